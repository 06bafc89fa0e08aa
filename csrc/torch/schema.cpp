#include <torch/library.h>

#include <vector>

// Every op of the library: torch.ops.kvswap_torch.*. Shapes, dtypes and errors are documented in
// kvswap_torch/ops.py.
TORCH_LIBRARY(kvswap_torch, library) {
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag};
  const auto define = [&](const char* schema) { library.def(schema, tags); };
  define("low_rank_score(Tensor summary, Tensor query, Tensor? token_scale=None) -> Tensor");
  define("group_max(Tensor scores, int group_tokens) -> Tensor");
  define(
      "group_mass(Tensor summary, Tensor query, int group_tokens, str join=\"sum\", "
      "Tensor? token_scale=None) -> Tensor");
  define("top_k_groups(Tensor scores, int k) -> (Tensor indices, Tensor counts)");
  define(
      "select_groups(Tensor summary, Tensor query, int group_tokens, int k, "
      "Tensor? token_scale=None, Tensor? first_tokens=None, Tensor? last_tokens=None) "
      "-> (Tensor indices, Tensor counts)");
  define(
      "project_keys(Tensor keys, Tensor projection, ScalarType? summary_dtype=None) "
      "-> (Tensor summary, Tensor token_scale)");
  define("linear_rows(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor");
  define("paged_gather(Tensor pages, Tensor table) -> (Tensor keys, Tensor values)");
  define("pack_records(Tensor keys, Tensor values, int group_tokens) -> Tensor");
  define(
      "unpack_records(Tensor records, int tokens, str layout=\"hnd\") "
      "-> (Tensor keys, Tensor values)");
  define(
      "transfer_records(Tensor source, Tensor(a!) target, Tensor source_slots, "
      "Tensor target_slots) -> ()");
  define("encode_records(Tensor records) -> (Tensor encoded, Tensor exponents)");
  define("decode_records(Tensor encoded, Tensor exponents, ScalarType dtype) -> Tensor");
  define("encode_int4_records(Tensor records) -> Tensor");
  define(
      "decode_int4_records(Tensor encoded, int group_tokens, int head_dim, ScalarType dtype) "
      "-> Tensor");
  define(
      "prefetch_open(str path, int record_bytes, int first_byte=0, str reader=\"auto\", "
      "str io=\"auto\", int depth=64) -> Tensor");
  define("prefetch_submit(Tensor handle, Tensor records) -> Tensor");
  define("prefetch_wait(Tensor handle, Tensor ticket, SymInt[] shape, ScalarType dtype) -> Tensor");
  define("prefetch_close(Tensor(a!) handle) -> ()");
  define("fp8_quantize(Tensor source) -> (Tensor quantized, Tensor scales)");
  define("fp8_dequantize(Tensor quantized, Tensor scales, ScalarType dtype) -> Tensor");
  define(
      "paged_attention(Tensor query, Tensor pages, Tensor table, Tensor masks, Tensor positions, "
      "Tensor query_positions, float scale, float softcap=0, Tensor? sinks=None) "
      "-> (Tensor output, Tensor log_sum_exp)");
  define(
      "attention_mass(Tensor query, Tensor pages, Tensor table, Tensor masks, Tensor positions, "
      "Tensor query_positions, Tensor log_sum_exp, float scale, float softcap=0) "
      "-> (Tensor mean, Tensor square)");
  define(
      "observe_keys(Tensor query, Tensor keys, float scale, Tensor? valid=None, "
      "Tensor? log_sum_exp=None, float softcap=0) -> (Tensor mean, Tensor square)");
  define(
      "merge_attention(Tensor output, Tensor log_sum_exp, Tensor other_output, "
      "Tensor other_log_sum_exp) -> (Tensor output, Tensor log_sum_exp)");
}
