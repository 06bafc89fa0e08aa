#include <kvswap/torch/tensor_cache.h>

#include <exception>
#include <iostream>

int main(int count, char** arguments) try {
  kvswap::OpenArgs args;
  args.shape = {.layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 64};
  args.directory = count > 1 ? arguments[1] : ".";
  if (count > 2) args.config_path = arguments[2];
  args.budget = {.kv_memory_bytes = 8 << 20, .max_context = 4096, .max_batch = 1};
  kvswap::TensorCache cache(args);

  for (const int64_t tokens : {300, 1}) {  // a prompt, then a token
    cache.begin_pass(tokens == 1 ? kvswap::Pass::kDecode : kvswap::Pass::kPrefill);
    for (int64_t layer = 0; layer < 2; ++layer) {
      const at::Tensor query = at::randn({1, 4, tokens, 64});  // after RoPE, as the keys
      const at::Tensor keys = at::randn({1, 2, tokens, 64}), values = at::randn_like(keys);
      cache.look_ahead(layer + 1, tokens, [&] { return query; });  // better: a QueryPredictor's
      cache.extend(layer, query, keys, values, 0.125);             // [1, tokens, 4, 64]
    }
  }
  std::cout << kvswap::report_text(cache.cache().report());
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
