// Devices, streams and events.

#include "device_memory.h"
#include "machine.h"

using fake_cuda::call;
using fake_cuda::state;
using fake_cuda::stream_of;

namespace {

CUevent_st& event_of(cudaEvent_t event) {
  const std::lock_guard lock(state().mutex);
  if (!state().events.contains(event)) fake_cuda::stop("an event that is none, or was destroyed");
  return *event;
}

bool has_device(int device) { return device >= 0 && device < state().options.devices; }

}  // namespace

cudaError_t cudaGetDeviceCount(int* count) {
  return call(__func__, [&] {
    *count = state().options.devices;
    return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
  });
}

cudaError_t cudaGetDevice(int* device) {
  return call(__func__, [&] {
    *device = fake_cuda::current_device();
    return cudaSuccess;
  });
}

cudaError_t cudaSetDevice(int device) {
  return call(__func__, [&] {
    if (!has_device(device)) return cudaErrorInvalidDevice;
    fake_cuda::current_device() = device;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int device) {
  return call(__func__, [&] {
    if (!has_device(device)) return cudaErrorInvalidDevice;
    *value = 1;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return call(__func__, [&] {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return call(__func__, [&] {
    if (flags != cudaStreamNonBlocking) fake_cuda::stop("streams that block are not faked");
    const std::lock_guard lock(state().mutex);
    *stream = fake_cuda::make_stream(fake_cuda::current_device());
    state().streams[*stream].reset(*stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return call(__func__, [&] {
    stream_of(stream).wait_until_done();
    const std::lock_guard lock(state().mutex);
    state().streams.erase(stream);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return call(__func__, [&] {
    stream_of(stream).wait_until_done();
    return cudaSuccess;
  });
}

/// For the record that is the newest now.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return call(__func__, [&] {
    CUstream_st& waiting = stream_of(stream);
    if (const auto point = event_of(event).newest) waiting.push([point] { point->wait(); });
    return cudaSuccess;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return call(__func__, [&] {
    *status = stream_of(stream).is_capturing ? cudaStreamCaptureStatusActive
                                             : cudaStreamCaptureStatusNone;
    return cudaSuccess;
  });
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call(__func__, [&] {
    *event = new CUevent_st{.device = fake_cuda::current_device(),
                            .is_timed = (flags & cudaEventDisableTiming) == 0,
                            .newest = nullptr};
    const std::lock_guard lock(state().mutex);
    state().events.insert(*event);
    return cudaSuccess;
  });
}

/// What waits for its records goes on to.
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return call(__func__, [&] {
    delete &event_of(event);
    const std::lock_guard lock(state().mutex);
    state().events.erase(event);
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return call(__func__, [&] {
    CUevent_st& recorded = event_of(event);
    CUstream_st& on = stream_of(stream);
    if (recorded.device != on.device) return cudaErrorInvalidResourceHandle;
    recorded.newest = std::make_shared<fake_cuda::Point>();
    on.push_reach(recorded.newest);
    return cudaSuccess;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return call(__func__, [&] {
    if (const auto point = event_of(event).newest) point->wait();
    return cudaSuccess;
  });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  return call(__func__, [&] {
    const CUevent_st& first = event_of(begin);
    const CUevent_st& last = event_of(end);
    if (!first.is_timed || !last.is_timed || first.newest == nullptr || last.newest == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (!first.newest->is_reached() || !last.newest->is_reached()) return cudaErrorNotReady;
    *milliseconds =
        std::chrono::duration<float, std::milli>(last.newest->when() - first.newest->when())
            .count();
    return cudaSuccess;
  });
}
