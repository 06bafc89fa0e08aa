#include "kvswap/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "kernels/cpu/element.h"
#include "kvswap/errors.h"
#include "kvswap/json.h"

namespace kvswap {

static_assert(std::endian::native == std::endian::little, "the format's numbers are little-endian");

/// A file's bytes, read-only.
class SafetensorsFile::Mapping {
 public:
  explicit Mapping(const std::string& path) {
    // Not to wait for the writer of a pipe of that name.
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) fail(path);
    struct stat facts;
    const bool is_known = ::fstat(fd, &facts) == 0;
    if (is_known && S_ISREG(facts.st_mode) && facts.st_size > 0) {
      size_ = static_cast<size_t>(facts.st_size);
      data_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    }
    const int number = is_known && S_ISDIR(facts.st_mode) ? EISDIR : errno;
    ::close(fd);
    errno = number;
    if (is_known && !S_ISREG(facts.st_mode) && number != EISDIR)
      throw ConfigError("it is no regular file");
    if (is_known && S_ISREG(facts.st_mode) && facts.st_size == 0) throw ConfigError("it is empty");
    if (data_ == MAP_FAILED) fail(path);
  }
  ~Mapping() {
    if (data_ != MAP_FAILED) ::munmap(data_, size_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), size_}; }

 private:
  [[noreturn]] static void fail(const std::string& path) {
    throw ConfigError(std::strerror(errno) + std::string(": ") + path);
  }

  void* data_ = MAP_FAILED;
  size_t size_ = 0;
};

namespace {

constexpr uint64_t kHeaderBytesMax = 16 << 20;  // the format allows 100 MB; ours take kilobytes

int64_t bits_of(const std::string& dtype) {
  static const std::map<std::string, int64_t> bits = {
      {"BOOL", 8}, {"U8", 8},   {"I8", 8},    {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"I16", 16},
      {"U16", 16}, {"F16", 16}, {"BF16", 16}, {"I32", 32},    {"U32", 32},    {"F32", 32},
      {"F64", 64}, {"I64", 64}, {"U64", 64},  {"C64", 64},
  };
  const auto found = bits.find(dtype);
  return found == bits.end() ? 0 : found->second;
}

#if KVSWAP_HAS_JSON

/// A list of numbers that are not negative.
bool read_numbers(const Json* value, std::vector<int64_t>& numbers) {
  if (!value || !value->is_array()) return false;
  for (const Json& item : *value) {
    // The parser gives what is not negative as unsigned.
    if (!item.is_number_unsigned() || item.get<uint64_t>() > INT64_MAX) return false;
    numbers.push_back(item.get<int64_t>());
  }
  return true;
}

StoredTensor read_tensor(const std::string& name, const Json& entry,
                         std::span<const std::byte> data) {
  StoredTensor tensor;
  const auto refuse = [&](const std::string& why) {
    throw ConfigError("tensor " + name + " " + why);
  };
  const Json* dtype = find_field(entry, "dtype");
  std::vector<int64_t> offsets;
  if (!dtype || !dtype->is_string() || !read_numbers(find_field(entry, "shape"), tensor.shape) ||
      !read_numbers(find_field(entry, "data_offsets"), offsets) || offsets.size() != 2) {
    refuse("must have dtype, shape and two data_offsets");
  }
  tensor.dtype = dtype->get<std::string>();
  const int64_t bits = bits_of(tensor.dtype);
  if (bits == 0) refuse("has a dtype that is not known, " + tensor.dtype);
  int64_t bytes = bits / 8;
  for (const int64_t size : tensor.shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) refuse("is larger than any file");
  }
  const auto size = static_cast<int64_t>(data.size());
  if (offsets[0] > offsets[1] || offsets[1] > size || offsets[1] - offsets[0] != bytes) {
    refuse("must lie in bytes 0.." + std::to_string(size) + " and be " + std::to_string(bytes) +
           " long, is at " + std::to_string(offsets[0]) + ".." + std::to_string(offsets[1]));
  }
  tensor.bytes = data.subspan(offsets[0], bytes);
  return tensor;
}

Json read_header(std::string_view text) {
  Json header;
  try {
    header = parse_json(text);
  } catch (const JsonError& error) {
    throw ConfigError(std::string("its header must be valid JSON: ") + error.what());
  }
  if (!header.is_object()) throw ConfigError("its header must be a JSON object");
  return header;
}

/// Tensors lie one after the other, from the first byte to the last.
void check_cover(const std::map<std::string, StoredTensor>& tensors,
                 std::span<const std::byte> data) {
  std::vector<std::span<const std::byte>> parts;
  for (const auto& [name, tensor] : tensors) parts.push_back(tensor.bytes);
  std::ranges::sort(parts, [](const auto& a, const auto& b) {
    return a.data() != b.data() ? a.data() < b.data() : a.size() < b.size();
  });
  const std::byte* end = data.data();
  for (const auto& part : parts) {
    if (part.data() != end) {
      throw ConfigError("its tensors must cover its bytes one after the other, and " +
                        std::string(part.data() < end ? "two share some" : "some are of none"));
    }
    end = part.data() + part.size();
  }
  if (end != data.data() + data.size()) {
    throw ConfigError(
        "its tensors must cover its bytes one after the other, and the last are of none");
  }
}

#endif

template <typename Stored, typename Convert>
std::vector<float> converted(const StoredTensor& tensor, const Convert& convert) {
  std::vector<float> floats(tensor.elements());
  for (size_t i = 0; i < floats.size(); ++i) {
    Stored stored;
    std::memcpy(&stored, tensor.bytes.data() + i * sizeof(Stored), sizeof(Stored));
    floats[i] = convert(stored);
  }
  return floats;
}

}  // namespace

int64_t StoredTensor::elements() const {
  return static_cast<int64_t>(bytes.size()) * 8 / bits_of(dtype);
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : mapping_(std::make_unique<Mapping>(path)) {
  const std::span<const std::byte> bytes = mapping_->bytes();
  uint64_t length = 0;
  if (bytes.size() >= sizeof(length)) std::memcpy(&length, bytes.data(), sizeof(length));
  if (length < 2 || length > kHeaderBytesMax || length > bytes.size() - sizeof(length)) {
    throw ConfigError("its header must be 2 bytes or more and lie in the file, got " +
                      std::to_string(length) + " in " + std::to_string(bytes.size()));
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + sizeof(length), length);
#if KVSWAP_HAS_JSON
  const Json header = read_header(text);
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      for (const auto& [fact, value] : entry.items()) {
        if (!value.is_string()) throw ConfigError("its metadata must be strings");
        metadata_[fact] = value.get<std::string>();
      }
    } else {
      tensors_[name] = read_tensor(name, entry, bytes.subspan(sizeof(length) + length));
    }
  }
  check_cover(tensors_, bytes.subspan(sizeof(length) + length));
#else
  throw ConfigError("this kvswap_torch was built without nlohmann-json and cannot read its header");
#endif
}

SafetensorsFile::~SafetensorsFile() = default;

std::span<const std::byte> SafetensorsFile::bytes() const { return mapping_->bytes(); }

std::vector<float> as_floats(const StoredTensor& tensor) {
  if (tensor.dtype == "F32") {
    return converted<float>(tensor, [](float value) { return value; });
  }
  if (tensor.dtype == "F64") {
    return converted<double>(tensor, [](double value) { return static_cast<float>(value); });
  }
  if (tensor.dtype == "F16") {
    return converted<Float16>(tensor, [](Float16 value) { return to_float(value); });
  }
  if (tensor.dtype == "BF16") {
    return converted<BFloat16>(tensor, [](BFloat16 value) { return to_float(value); });
  }
  throw ConfigError("a tensor of floats must be F32, F16, BF16 or F64, got " + tensor.dtype);
}

}  // namespace kvswap
