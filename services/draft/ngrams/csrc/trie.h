// Token paths with 32 bytes a node and 8 to 16 bytes of a hash table over (parent, token).
//
// A node's children form a list, the most recent first. All nodes form another list by recency; of nodes stored
// together the shallower counts as more recent, so that the last node is always a leaf, which is evicted first.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace outrider {

constexpr uint32_t kNone = 0xFFFFFFFF;
constexpr uint32_t kRoot = 0;

struct Node {
  uint32_t token, parent;
  uint32_t first;       // child stored last
  uint32_t next, prev;  // siblings stored before and after it
  uint32_t older, newer;
  uint32_t frequency;
};
static_assert(sizeof(Node) == 32);

class Trie {
 public:
  explicit Trie(uint32_t capacity) : capacity_(capacity) {
    // calloc takes no memory for pages without nodes.
    nodes_ = static_cast<Node*>(std::calloc(size_t{capacity} + 1, sizeof(Node)));
    if (nodes_ == nullptr) throw std::bad_alloc();
    clear();
  }
  Trie(const Trie&) = delete;
  Trie& operator=(const Trie&) = delete;
  ~Trie() {
    std::free(nodes_);
    std::free(table_);
  }

  void clear() {
    std::free(table_);
    make_table(1 << 12);
    nodes_[kRoot] = Node{kNone, kNone, kNone, kNone, kNone, kRoot, kRoot, 0};
    size_ = used_ = 0;
    free_ = kNone;
  }

  uint32_t size() const { return size_; }
  const Node& operator[](uint32_t node) const { return nodes_[node]; }
  // Bytes of nodes and table.
  int64_t bytes() const { return int64_t{used_ + 1} * int64_t(sizeof(Node)) + (int64_t{mask_} + 1) * 8; }

  uint32_t child(uint32_t parent, uint32_t token) const {
    const uint32_t key = hash(parent, token);
    for (uint32_t place = key & mask_;; place = (place + 1) & mask_) {
      const uint64_t entry = table_[place];
      if (entry == 0) return kNone;
      const uint32_t node = uint32_t(entry);
      if (uint32_t(entry >> 32) == key && nodes_[node].parent == parent && nodes_[node].token == token) return node;
    }
  }

  // Store a path, below the namespace unless that is kNone. A path longer than the capacity is truncated.
  void insert(uint32_t namespace_id, const uint32_t* tokens, int64_t count) {
    uint32_t above = kRoot, length = 0;
    if (namespace_id != kNone) above = step(above, namespace_id, length++);
    for (int64_t i = 0; i < count && above != kNone; ++i) above = step(above, tokens[i], length++);
  }

 private:
  // Store a child as number `length` of its path; kNone if the path itself fills the capacity.
  uint32_t step(uint32_t parent, uint32_t token, uint32_t length) {
    uint32_t node = child(parent, token);
    if (node == kNone) {
      node = make(parent, token, length);
      if (node == kNone) return kNone;
    } else {
      ++nodes_[node].frequency;
      if (nodes_[parent].first != node) {
        unlink_sibling(node);
        link_sibling(parent, node);
      }
      if (nodes_[parent].older != node) unlink_age(node);
    }
    if (nodes_[parent].older != node) link_age(parent, node);
    return node;
  }

  uint32_t make(uint32_t parent, uint32_t token, uint32_t length) {
    if (size_ >= capacity_) {
      if (size_ == length) return kNone;
      evict();
    }
    uint32_t node = free_;
    if (node != kNone) {
      free_ = nodes_[node].next;
    } else {
      node = ++used_;
    }
    nodes_[node] = Node{token, parent, kNone, kNone, kNone, kNone, kNone, 1};
    ++size_;
    if (uint64_t{size_} * 10 > (uint64_t{mask_} + 1) * 7) grow_table();
    put(hash(parent, token), node);
    link_sibling(parent, node);
    return node;
  }

  void evict() {
    const uint32_t node = nodes_[kRoot].newer;  // the list is circular: the root follows the oldest node
    unlink_age(node);
    unlink_sibling(node);
    remove(hash(nodes_[node].parent, nodes_[node].token), node);
    nodes_[node].next = free_;
    free_ = node;
    --size_;
  }

  void link_sibling(uint32_t parent, uint32_t node) {
    const uint32_t next = nodes_[parent].first;
    nodes_[node].next = next;
    nodes_[node].prev = kNone;
    if (next != kNone) nodes_[next].prev = node;
    nodes_[parent].first = node;
  }
  void unlink_sibling(uint32_t node) {
    const uint32_t next = nodes_[node].next, prev = nodes_[node].prev;
    if (next != kNone) nodes_[next].prev = prev;
    (prev == kNone ? nodes_[nodes_[node].parent].first : nodes_[prev].next) = next;
  }
  void link_age(uint32_t behind, uint32_t node) {
    const uint32_t older = nodes_[behind].older;
    nodes_[node].older = older;
    nodes_[node].newer = behind;
    nodes_[older].newer = node;
    nodes_[behind].older = node;
  }
  void unlink_age(uint32_t node) {
    const uint32_t older = nodes_[node].older, newer = nodes_[node].newer;
    nodes_[older].newer = newer;
    nodes_[newer].older = older;
  }

  // --- the table: open addressing, an entry is (hash, node), 0 is free ---

  static uint32_t hash(uint32_t parent, uint32_t token) {
    uint64_t x = (uint64_t{parent} << 32 | token) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93u;
    return uint32_t(x >> 32);
  }
  void make_table(uint32_t size) {
    table_ = static_cast<uint64_t*>(std::calloc(size, sizeof(uint64_t)));
    if (table_ == nullptr) throw std::bad_alloc();
    mask_ = size - 1;
  }
  void put(uint32_t key, uint32_t node) {
    uint32_t place = key & mask_;
    while (table_[place] != 0) place = (place + 1) & mask_;
    table_[place] = uint64_t{key} << 32 | node;
  }
  void remove(uint32_t key, uint32_t node) {
    uint32_t hole = key & mask_;
    while (uint32_t(table_[hole]) != node) hole = (hole + 1) & mask_;
    for (uint32_t place = (hole + 1) & mask_; table_[place] != 0; place = (place + 1) & mask_) {
      const uint32_t home = uint32_t(table_[place] >> 32) & mask_;
      // An entry may fill the hole unless its home lies behind it.
      if (((place - home) & mask_) >= ((place - hole) & mask_)) {
        table_[hole] = table_[place];
        hole = place;
      }
    }
    table_[hole] = 0;
  }
  void grow_table() {
    uint64_t* old = table_;
    const uint32_t size = mask_ + 1;
    make_table(2 * size);
    for (uint32_t place = 0; place < size; ++place) {
      if (old[place] != 0) put(uint32_t(old[place] >> 32), uint32_t(old[place]));
    }
    std::free(old);
  }

  uint32_t capacity_;
  Node* nodes_ = nullptr;
  uint64_t* table_ = nullptr;
  uint32_t mask_ = 0;
  uint32_t size_ = 0, used_ = 0, free_ = kNone;
};

}  // namespace outrider
