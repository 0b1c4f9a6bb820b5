#include "merges.h"

#include <algorithm>
#include <cstring>
#include <queue>
#include <unordered_map>

namespace ork {
namespace {

constexpr uint32_t NONE = 0xFFFFFFFF;

struct Text { const uint8_t* data; uint64_t length; };

Text text_of(const Texts& t, uint64_t i) { return {t.data + t.starts[i], t.lengths[i]}; }

uint64_t hash_of(Text t) {   // eight bytes a step: texts are a few bytes, a run of spaces or dashes may be a hundred
    uint64_t h = t.length * 0x9E3779B97F4A7C15u;
    while (t.length) {
        uint64_t word = 0;
        const uint64_t n = t.length < 8 ? t.length : 8;
        std::memcpy(&word, t.data, n);
        h = (h ^ word) * 0xD6E8FEB86659FD93u;
        h ^= h >> 32;
        t.data += n;
        t.length -= n;
    }
    return h;
}

uint64_t character_bytes(uint8_t first) { return first < 0x80 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4; }

// text -> token, in open addressing.
class Vocabulary {
  public:
    Vocabulary(const Texts& tokens, const uint8_t* mergeable) : tokens_(tokens) {
        uint64_t size = 16;
        while (size < 2 * tokens.count) size *= 2;
        slots_.assign(size, NONE);
        tags_.assign(size, 0);
        for (uint64_t i = 0; i < tokens.count; i++) {
            const Text text = text_of(tokens, i);
            if (!mergeable[i] || !text.length) continue;
            const uint64_t h = hash_of(text), at = place(text, h);
            if (slots_[at] != NONE) continue;
            slots_[at] = (uint32_t)i;
            tags_[at] = (uint32_t)(h >> 32);
            ids_.push_back((uint32_t)i);
            longest_ = std::max(longest_, text.length);
        }
    }
    uint32_t find(Text text) const { return text.length && text.length <= longest_ ? slots_[place(text, hash_of(text))] : NONE; }
    const std::vector<uint32_t>& ids() const { return ids_; }
    Text operator[](uint32_t id) const { return text_of(tokens_, id); }

  private:
    uint64_t place(Text text, uint64_t h) const {
        const uint64_t mask = slots_.size() - 1;
        for (uint64_t at = h & mask;; at = (at + 1) & mask) {
            if (slots_[at] == NONE) return at;
            if (tags_[at] != (uint32_t)(h >> 32)) continue;
            const Text held = text_of(tokens_, slots_[at]);
            if (held.length == text.length && !std::memcmp(held.data, text.data, text.length)) return at;
        }
    }
    const Texts tokens_;
    std::vector<uint32_t> slots_, tags_;
    std::vector<uint32_t> ids_;
    uint64_t longest_ = 0;
};

// Joins the characters of a text, best rank first and leftmost on a tie, until two parts are left or nothing can be joined.
// A heap beside the chain of parts: a text of n characters costs n log n, whatever it holds.
class Joiner {
  public:
    // rank(left, right) of neighbouring parts, NONE if they don't join. True if two parts are left: *cut is where.
    template <class Rank> bool join(Text text, Rank&& rank, uint64_t* cut) {
        starts_.clear();
        for (uint64_t at = 0; at < text.length; at += character_bytes(text.data[at])) starts_.push_back(at);
        uint64_t parts = starts_.size();
        if (parts < 2) return false;
        const uint32_t n = (uint32_t)parts;
        starts_.push_back(text.length);
        next_.resize(n + 1);
        before_.resize(n + 1);
        for (uint32_t i = 0; i <= n; i++) { next_[i] = i + 1; before_[i] = i - 1; }
        auto part = [&](uint32_t i) { return Text{text.data + starts_[i], starts_[next_[i]] - starts_[i]}; };
        auto offer = [&](uint32_t i) {   // part i and the one behind it
            const uint32_t j = next_[i];
            if (j >= n) return;
            const uint32_t r = rank(part(i), part(j));
            if (r != NONE) heap_.push({r, i, j, next_[j]});
        };
        heap_ = {};
        if (parts > 2) for (uint32_t i = 0; i + 1 < n; i++) offer(i);
        while (parts > 2 && !heap_.empty()) {
            const Pair best = heap_.top();
            heap_.pop();
            if (next_[best.left] != best.right || next_[best.right] != best.end) continue;   // one of them has been joined
            next_[best.left] = best.end;
            before_[best.end] = best.left;
            next_[best.right] = NONE;
            parts--;
            if (best.left) offer(before_[best.left]);
            offer(best.left);
        }
        *cut = starts_[next_[0]];
        return parts == 2;
    }

  private:
    struct Pair {
        uint32_t rank, left, right, end;
        bool operator<(const Pair& other) const { return rank != other.rank ? rank > other.rank : left > other.left; }   // the top is the best
    };
    std::vector<uint64_t> starts_;
    std::vector<uint32_t> next_, before_;
    std::priority_queue<Pair> heap_;
};

uint64_t characters(Text t) {
    uint64_t n = 0;
    for (uint64_t i = 0; i < t.length; i++) n += (t.data[i] & 0xC0) != 0x80;
    return n;
}

}  // namespace

std::vector<uint32_t> distinct_texts(const Texts& tokens, const uint8_t* mergeable) { return Vocabulary(tokens, mergeable).ids(); }

std::vector<Merge> merges_by_score(const Texts& tokens, const uint8_t* mergeable, const double* scores) {
    const Vocabulary vocabulary(tokens, mergeable);
    std::vector<uint32_t> order = vocabulary.ids(), rank(tokens.count, NONE), sizes(tokens.count, 0);
    for (uint32_t id : order) sizes[id] = (uint32_t)characters(vocabulary[id]);
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
        if (scores[a] != scores[b]) return scores[a] > scores[b];
        return sizes[a] != sizes[b] ? sizes[a] > sizes[b] : a < b;
    });
    for (size_t r = 0; r < order.size(); r++) rank[order[r]] = (uint32_t)r;
    auto joined = [&](Text left, Text right) {   // parts are neighbours in memory
        const uint32_t id = vocabulary.find({left.data, left.length + right.length});
        return id == NONE ? NONE : rank[id];
    };
    std::vector<Merge> merges;
    Joiner joiner;
    for (uint32_t id : order) {
        const Text text = vocabulary[id];
        uint64_t cut;
        if (!joiner.join(text, joined, &cut)) continue;
        const uint32_t left = vocabulary.find({text.data, cut}), right = vocabulary.find({text.data + cut, text.length - cut});
        if (left != NONE && right != NONE) merges.push_back({left, right, id});
    }
    return merges;
}

std::vector<Merge> merges_as_listed(const Texts& tokens, const uint8_t* mergeable, const Texts& listed, const uint64_t* cuts) {
    const Vocabulary vocabulary(tokens, mergeable);
    std::vector<Merge> merges;
    std::unordered_map<uint64_t, uint32_t> rank;   // left, right -> its place in `merges`
    rank.reserve(listed.count);
    auto pair_of = [](uint32_t left, uint32_t right) { return (uint64_t)left << 32 | right; };
    std::vector<uint32_t> makers(tokens.count, 0);
    std::vector<uint8_t> both;
    bool once = true;
    for (uint64_t i = 0; i < listed.count; i++) {
        const Text line = text_of(listed, i);
        uint64_t cut = cuts ? cuts[i] : line.length ? character_bytes(line.data[0]) : 0;
        if (!cuts) while (cut < line.length && line.data[cut] != ' ') cut++;
        if (cut >= line.length) continue;
        const uint32_t left = vocabulary.find({line.data, cut}), right = vocabulary.find({line.data + cut + 1, line.length - cut - 1});
        if (left == NONE || right == NONE) continue;
        both.assign(line.data, line.data + cut);
        both.insert(both.end(), line.data + cut + 1, line.data + line.length);
        const uint32_t result = vocabulary.find({both.data(), both.size()});
        if (result == NONE || !rank.emplace(pair_of(left, right), (uint32_t)merges.size()).second) continue;
        merges.push_back({left, right, result});
        once &= ++makers[result] == 1;
    }
    if (once) return merges;
    // Several merges make the same token: the last one of its own text stays.
    auto rank_of = [&](Text left, Text right) {
        const uint32_t a = vocabulary.find(left), b = a == NONE ? NONE : vocabulary.find(right);
        if (b == NONE) return NONE;
        const auto found = rank.find(pair_of(a, b));
        return found == rank.end() ? NONE : found->second;
    };
    std::vector<uint32_t> kept;
    Joiner joiner;
    for (uint32_t id : vocabulary.ids()) {
        const Text text = vocabulary[id];
        uint64_t cut;
        if (!makers[id] || !joiner.join(text, rank_of, &cut)) continue;
        const uint32_t r = rank_of({text.data, cut}, {text.data + cut, text.length - cut});
        if (r != NONE) kept.push_back(r);
    }
    std::sort(kept.begin(), kept.end());
    std::vector<Merge> best;
    for (uint32_t r : kept) best.push_back(merges[r]);
    return best;
}

}  // namespace ork
