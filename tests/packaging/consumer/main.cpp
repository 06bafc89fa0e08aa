#include <kvswap/torch/session.h>

#include <iostream>

int main(int, char** arguments) {
  kvswap::SessionOptions options;
  options.layers = 2;
  options.heads = 4;
  options.kv_heads = 2;
  options.head_dim = 64;
  options.ranks = {16, 16};
  options.directory = arguments[1];
  kvswap::Session session(options);
  const auto keys = at::randn({1, 2, 100, 64});
  for (int64_t layer = 0; layer < options.layers; ++layer) session.append(layer, keys, keys);
  session.attend(1, at::randn({1, 4, 1, 64}), keys, keys, 0.125);
  std::cout << session.columns(0) << " tokens kept, " << session.facts()["reader"] << " reader\n";
}
