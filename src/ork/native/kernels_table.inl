// The surrounding namespace's functions as constant data: nothing of this instruction set runs before it is chosen.
#define ORK_TABLE(name) {name, linear_i8, accumulate_i8, scale_partial_sums, linear_f32, linear_f16, quantise, rotate, rms_norm, head_norm, rope, rope_table, gate, add, scale, \
                         softcap, gather, kv_append, attention_scratch, attention_block, attention_merge, attention_finish, softmax, top, exp_sums, quantise_weights, int8_peak, float_peak, read_memory, linear_grouped, accumulate_grouped, inflate, \
                         sigmoid, weighted_sum, gate_rows, conv_append, short_conv}
