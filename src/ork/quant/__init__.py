"""Quantisers: pure functions from f32 rows to codes and scales."""
