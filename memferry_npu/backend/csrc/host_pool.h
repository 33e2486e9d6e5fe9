// A persistent pool of threads for the host ops. Header-only; one pool per library.
//
// Several callers may run jobs at once: each caller works on its own job, and
// idle workers join the oldest job that still has room. The pool is never
// destroyed, so that no worker outlives it at exit, and a forked child starts
// with an empty one, since threads do not survive fork.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace mf {

// IEEE defaults (round to nearest, no flush-to-zero) for the life of the object: the caller may
// have switched them in its own thread, and a new thread inherits its creator's.
class DefaultFloat {
 public:
  DefaultFloat() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloat() { std::fesetenv(&saved_); }
  DefaultFloat(const DefaultFloat &) = delete;
  DefaultFloat &operator=(const DefaultFloat &) = delete;

 private:
  std::fenv_t saved_;
};

class Pool {
 public:
  using Task = void (*)(void *context, size_t index);

  static Pool &instance() { return *holder(); }

  // Calls task(context, i) once for each i < count, on at most `threads` threads, the
  // caller's among them. Tasks must not throw.
  void run(size_t count, unsigned threads, Task task, void *context) {
    Job job{task, context, count};
    const size_t useful = std::min<size_t>(threads, count);
    if (useful <= 1) return drain(job);
    std::unique_lock<std::mutex> lock(mutex_);
    grow(useful - 1);
    job.room = std::min(useful - 1, workers_);
    if (job.room) jobs_.push_back(&job);
    lock.unlock();
    for (size_t i = 1; i < useful; ++i) work_.notify_one();
    drain(job);
    lock.lock();
    // Once it is off the list no worker can join; then wait for those inside.
    jobs_.erase(std::remove(jobs_.begin(), jobs_.end(), &job), jobs_.end());
    done_.wait(lock, [&] { return job.inside == 0; });
  }

  static unsigned available_cores() {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
      return static_cast<unsigned>(CPU_COUNT(&set));
    return std::max(1u, std::thread::hardware_concurrency());
  }

 private:
  struct Job {
    Task task;
    void *context;
    size_t count;
    std::atomic<size_t> next{0};
    size_t room = 0;    // workers that may still join; guarded by mutex_
    size_t inside = 0;  // workers that joined and have not left; guarded by mutex_
  };

  static constexpr size_t kMaxWorkers = 1023;

  static Pool *&holder() {
    static Pool *pool = [] {
      pthread_atfork(nullptr, nullptr, [] { holder() = new Pool; });
      return new Pool;
    }();
    return pool;
  }

  static void drain(Job &job) {
    DefaultFloat guard;
    for (size_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count;)
      job.task(job.context, i);
  }

  void grow(size_t wanted) {  // with mutex_ held
    wanted = std::min(wanted, kMaxWorkers);
    // Signals belong to the program's own threads (Python handles them in its main one).
    if (workers_ >= wanted) return;
    sigset_t all, saved;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved);
    try {
      while (workers_ < wanted) {
        std::thread([this] { work(); }).detach();
        ++workers_;
      }
    } catch (const std::system_error &) {
      // No more threads to be had: the job runs on those there are.
    }
    pthread_sigmask(SIG_SETMASK, &saved, nullptr);
  }

  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_.wait(lock, [&] { return !jobs_.empty(); });
      Job &job = *jobs_.front();
      ++job.inside;
      if (--job.room == 0) jobs_.pop_front();
      lock.unlock();
      drain(job);
      lock.lock();
      if (--job.inside == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<Job *> jobs_;
  size_t workers_ = 0;
};

// body(begin, end) over [0, n) in blocks of `block` elements.
template <class Body>
void parallel_blocks(size_t n, size_t block, unsigned threads, Body &&body) {
  struct Context {
    size_t n, block;
    std::remove_reference_t<Body> *body;
  } context{n, block, &body};
  Pool::instance().run((n + block - 1) / block, threads ? threads : Pool::available_cores(),
                       [](void *raw, size_t index) {
                         auto &c = *static_cast<Context *>(raw);
                         const size_t begin = index * c.block;
                         (*c.body)(begin, std::min(begin + c.block, c.n));
                       },
                       &context);
}

}  // namespace mf
