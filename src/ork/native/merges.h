// From a vocabulary's texts to the merges that make its tokens: what a model's conversion derives once.
#pragma once
#include <cstdint>
#include <vector>

namespace ork {

// `count` byte strings data[starts[i], starts[i] + lengths[i]), valid UTF-8; the maker has checked the ranges.
struct Texts {
    const uint8_t* data;
    const uint64_t* starts;
    const uint64_t* lengths;
    uint64_t count;
};

struct Merge { uint32_t left, right, result; };   // tokens

// The tokens that merging may make: the first of each text among those with mergeable[i] != 0 that are not empty, ascending.
std::vector<uint32_t> distinct_texts(const Texts& tokens, const uint8_t* mergeable);

// SentencePiece's merges, best first. Any two neighbours whose joined text is a token may be joined; the order of tokens is
// their score from high to low, then their characters from many to few, then their number. A token's merge is the last one of
// its own text, joined best first and leftmost on a tie; tokens that are not made so have none.
std::vector<Merge> merges_by_score(const Texts& tokens, const uint8_t* mergeable, const double* scores);

// The merges of a list, best first. Merge i joins the first cuts[i] bytes of listed i and what follows the byte behind them;
// cuts == nullptr: the first space behind the first character divides. Merges of parts that are no tokens are left out. Of
// merges that make the same token only the one stays that makes the token's own text.
std::vector<Merge> merges_as_listed(const Texts& tokens, const uint8_t* mergeable, const Texts& listed, const uint64_t* cuts);

}  // namespace ork
