// A few threads that wait for work and share the pieces of one job among them.
//
// Threads live as long as the process, since starting one costs as much as a small product. A
// waiting thread spins for some microseconds (the next layer usually comes at once), then sleeps.
// The caller waits for pieces, not for threads: on a busy machine one that has not woken yet is not
// waited for. So that such a thread takes nothing of a later job, the number of the job stands in
// one word with the number of the next piece. One job at a time: a second caller, from another
// Python thread, works alone meanwhile instead of queueing. After fork() the child has no such
// threads; it notices and makes its own.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>

namespace skipless {

class Pool {
 public:
  // Call piece(i) for i in [0, count), each once, on up to `threads` threads; returns when done.
  static void run(int64_t count, int threads, const std::function<void(int64_t)>& piece) {
    if (threads > count) threads = static_cast<int>(count);
    if (threads > 1) {
      Pool* pool = current();
      std::unique_lock<std::mutex> turn(pool->turn_, std::try_to_lock);
      if (turn.owns_lock()) return pool->share(count, threads, piece);
    }
    for (int64_t i = 0; i < count; ++i) piece(i);
  }

 private:
  // Leaked on purpose: threads may still wait in it while the process ends.
  static Pool* current() {
    static std::atomic<Pool*> pool{nullptr};
    Pool* found = pool.load();
    while (!found || found->owner_ != getpid()) {
      Pool* fresh = new Pool;
      if (pool.compare_exchange_strong(found, fresh)) return fresh;
      delete fresh;
    }
    return found;
  }

  void share(int64_t count, int threads, const std::function<void(int64_t)>& piece) {
    uint64_t job;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      piece_ = &piece;
      count_ = count;
      done_.store(0);
      try {
        for (; size_ < threads - 1; ++size_) {
          std::thread(&Pool::wait_for_work, this, size_, job_.load()).detach();
        }
      } catch (const std::system_error&) {  // no more threads to be had: fewer will do
      }
      helpers_ = std::min(threads - 1, size_);
      job = (job_.load() + 1) & 0xffffffffu;
      ticket_.store(job << 32);
      job_.store(job);
    }
    wake_.notify_all();
    take_pieces(job, count, piece);
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; ++spins) {
      if (spins > 1000) std::this_thread::yield();
    }
  }

  void take_pieces(uint64_t job, int64_t count, const std::function<void(int64_t)>& piece) {
    uint64_t ticket = ticket_.load();
    while (ticket >> 32 == job && static_cast<int64_t>(ticket & 0xffffffffu) < count) {
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1)) continue;
      piece(static_cast<int64_t>(ticket & 0xffffffffu));
      done_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load();
    }
  }

  void wait_for_work(int index, uint64_t seen) {
    for (;;) {
      for (int spins = 0; spins < 4000 && job_.load() == seen; ++spins) {
        if (spins % 64 == 63) std::this_thread::yield();
      }
      const std::function<void(int64_t)>* piece;
      int64_t count;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return job_.load() != seen; });
        seen = job_.load();
        if (index >= helpers_) continue;
        piece = piece_;
        count = count_;
      }
      take_pieces(seen, count, *piece);
    }
  }

  const pid_t owner_ = getpid();
  std::mutex turn_, mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> job_{0}, ticket_{0};
  std::atomic<int64_t> done_{0};
  int size_ = 0, helpers_ = 0;
  int64_t count_ = 0;
  const std::function<void(int64_t)>* piece_ = nullptr;
};

}  // namespace skipless
