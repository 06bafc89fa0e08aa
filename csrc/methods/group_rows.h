#pragma once

#include <cstdint>

#include "kernels/cpu/element.h"
#include "methods/rows.h"

namespace kvswap {

/// Calls body with a pointer to elements of the dtype's type.
template <typename Body>
void with_elements(const void* data, DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(static_cast<const float*>(data));
    case DType::kBFloat16:
      return body(static_cast<const BFloat16*>(data));
    case DType::kFloat16:
      return body(static_cast<const Float16*>(data));
    case DType::kInt8:
      return body(static_cast<const int8_t*>(data));
    case DType::kInt4:  // of low-rank rows alone
      return;
  }
}

/// Rows of one group each: of every channel one number or two, [kv_heads * head_dim] of the first,
/// then of the second. A query meets the first as it is and the second as bound_weight |q|.
///
/// What they need neither projection nor calibration for; padding is left out of them. Not for
/// small groups: a row is as large as the keys of one token or two.
class GroupRows : public Rows {
 public:
  RowShape shape(int64_t) const override { return shape_of(options_, numbers_); }
  void ask(int64_t layer, const QueryView& query, int64_t batch, float* asked) const override;
  void ask_each_head(int64_t layer, const QueryView& query, int64_t batch, float scale,
                     float* asked) const override;

 protected:
  /// numbers: of a channel, 1 or 2.
  GroupRows(const MethodOptions& options, int64_t numbers) : options_(options), numbers_(numbers) {}
  static RowShape shape_of(const MethodOptions& options, int64_t numbers) {
    return {.width = numbers * options.kv_heads * options.head_dim,
            .tokens_per_row = options.group_tokens};
  }
  const MethodOptions& options() const { return options_; }
  int64_t channels() const { return options_.kv_heads * options_.head_dim; }

  /// body(channel, key) for each key of a group that counts; its tokens from `first_token` on.
  template <typename Body>
  void for_each_key(const RowPiece& piece, int64_t first_token, const Body& body) const {
    with_elements(piece.keys.data, piece.keys.dtype, [&](const auto* keys) {
      for (int64_t token = first_token; token < first_token + options_.group_tokens; ++token) {
        if (piece.valid != nullptr && !piece.valid->is_valid(piece.first_token + token)) continue;
        for (int64_t channel = 0; channel < channels(); ++channel) {
          const int64_t head = channel / options_.head_dim;
          body(channel,
               to_float(keys[head * piece.keys.head_stride + token * piece.keys.token_stride +
                             channel % options_.head_dim]));
        }
      }
    });
  }

 private:
  void add_head(const QueryView& query, int64_t row, int64_t head, float scale, float* sums) const;

  MethodOptions options_;
  int64_t numbers_;
};

}  // namespace kvswap
