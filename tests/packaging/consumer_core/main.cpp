#include <kvswap/cache.h>

#include <exception>
#include <iostream>
#include <vector>

int main(int count, char** arguments) try {
  kvswap::OpenArgs args;
  args.shape = {.layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 64};
  args.directory = count > 1 ? arguments[1] : ".";
  if (count > 2) args.config_path = arguments[2];
  args.budget = {.kv_memory_bytes = 8 << 20, .max_context = 4096, .max_batch = 1};
  kvswap::Cache cache(args);

  const int64_t tokens = 300;
  std::vector<float> keys(2 * tokens * 64, 0.5f), query(4 * tokens * 64, 1.0f),
      output(query.size());
  cache.begin_pass(kvswap::Pass::kPrefill);
  for (int64_t layer = 0; layer < 2; ++layer) {
    cache.extend(layer,
                 kvswap::NewTokens::packed(keys.data(), keys.data(), args.shape, 1, tokens),
                 kvswap::Queries::packed(query.data(), 4, tokens, 64), 0.125f, output.data());
  }
  const kvswap::Report report = cache.report();
  std::cout << report.positions << " tokens kept in " << report.ledger.at("total") / 1024
            << " KiB, " << report.facts.at("reader") << " reader\n";
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
