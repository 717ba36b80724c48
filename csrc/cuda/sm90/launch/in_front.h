// What a launch stands behind, while a graph is captured.
//
// A launch of all multiprocessors that may begin early is 0.6 to 1.6 us sooner behind a kernel that triggers, and 0.2
// to 0.5 us later behind one that does not (benchmarks/results/hopper_notebook.md, section 8). A stream does not say
// what is in front; a capture does, as its last node is known when it is one of ours.
#pragma once
#include <cuda_runtime.h>

namespace moeq::sm90 {

// A node of a graph, and the capture that it was made in, whose number no other capture of the process has.
struct CapturedNode {
  unsigned long long capture;
  cudaGraphNode_t node;  // null: none, or several
};

// What the next launch of the stream will stand behind.
inline CapturedNode captured_in_front(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;  // asked for, or edges of dependent launches are an error
  size_t count = 0;
#if CUDART_VERSION >= 13000
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &capture, nullptr, &nodes, &edges, &count);
#else
  const cudaError_t error = cudaStreamGetCaptureInfo_v3(stream, &status, &capture, nullptr, &nodes, &edges, &count);
#endif
  if (error != cudaSuccess) cudaGetLastError();  // nobody else's business
  const bool is_one = error == cudaSuccess && status == cudaStreamCaptureStatusActive && count == 1;
  return is_one ? CapturedNode{capture, nodes[0]} : CapturedNode{};
}

// The last launch of this thread that was captured and lets the next one begin early.
inline CapturedNode& last_that_triggers() {
  thread_local CapturedNode last{};
  return last;
}

// Behind the launch of a kernel that triggers, having waited for nothing but kernels in front: one that waited for
// other GPUs, say, would hold up a launch that holds up all other streams.
inline void note_trigger(cudaStream_t stream) { last_that_triggers() = captured_in_front(stream); }

// Whether a launch of all multiprocessors gains by beginning early. With the drivers that it was tested with.
inline bool stands_behind_trigger(cudaStream_t stream) {
  static const bool was_tested = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 13000;
  }();
  if (!was_tested) return false;
  const CapturedNode front = captured_in_front(stream), &last = last_that_triggers();
  return front.node != nullptr && front.node == last.node && front.capture == last.capture;
}

}  // namespace moeq::sm90
