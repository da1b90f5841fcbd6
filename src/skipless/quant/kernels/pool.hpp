// A few threads that wait for work and share the pieces of one job among them.
//
// Threads live as long as the process, since starting one costs as much as a small product. A
// waiting thread spins for some microseconds (the next layer usually comes at once), then sleeps.
// One job at a time: a second caller, from another Python thread, works alone meanwhile instead of
// queueing. After fork() the child has no such threads; it notices and makes its own.
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
    {
      std::lock_guard<std::mutex> guard(mutex_);
      piece_ = &piece;
      count_ = count;
      next_.store(0);
      try {
        for (; size_ < threads - 1; ++size_) {
          std::thread(&Pool::wait_for_work, this, size_, job_.load()).detach();
        }
      } catch (const std::system_error&) {  // no more threads to be had: fewer will do
      }
      helpers_ = std::min(threads - 1, size_);
      busy_.store(helpers_);
      job_.fetch_add(1);
    }
    wake_.notify_all();
    take_pieces();
    for (int spins = 0; busy_.load(std::memory_order_acquire) > 0; ++spins) {
      if (spins > 1000) std::this_thread::yield();
    }
  }

  void take_pieces() {
    for (int64_t i; (i = next_.fetch_add(1)) < count_;) (*piece_)(i);
  }

  void wait_for_work(int index, uint64_t seen) {
    for (;;) {
      for (int spins = 0; spins < 4000 && job_.load() == seen; ++spins) {
        if (spins % 64 == 63) std::this_thread::yield();
      }
      bool mine;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return job_.load() != seen; });
        seen = job_.load();
        mine = index < helpers_;
      }
      if (mine) {
        take_pieces();
        busy_.fetch_sub(1, std::memory_order_release);
      }
    }
  }

  const pid_t owner_ = getpid();
  std::mutex turn_, mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> job_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<int> busy_{0};
  int size_ = 0, helpers_ = 0;
  int64_t count_ = 0;
  const std::function<void(int64_t)>* piece_ = nullptr;
};

}  // namespace skipless
