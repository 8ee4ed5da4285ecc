// Threads of a program, taking turns in one of the process: who waits at a barrier gives way to the next that need not wait.
// Threads of the process would spend most of their time in the kernel.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include <ucontext.h>

// The thread whose turn it is, and those that wait for theirs.
static int own;
static std::deque<int> ready;
static std::vector<ucontext_t> contexts;
static const std::function<void(int)> *role;

static void give_way() {
  if (ready.empty()) {
    puts("all threads wait");
    exit(0);
  }
  int from = own;
  own = ready.front();
  ready.pop_front();
  swapcontext(&contexts[from], &contexts[own]);
}

class Barrier {
  size_t count;
  std::vector<int> here;

public:
  explicit Barrier(size_t threads) : count(threads) {}

  void arrive_and_wait() {
    if (here.size() + 1 == count) {
      ready.insert(ready.end(), here.begin(), here.end());
      here.clear();
      return;
    }
    here.push_back(own);
    give_way();
  }
};

static void begin() {
  (*role)(own);
  // The last one goes back to run_threads, whose context is behind the others.
  if (ready.empty()) setcontext(&contexts.back());
  own = ready.front();
  ready.pop_front();
  setcontext(&contexts[own]);
}

static void run_threads(int count, const std::function<void(int)> &each) {
  constexpr size_t STACK = 1 << 18;
  role = &each;
  contexts.assign(count + 1, {});
  std::unique_ptr<char[]> stacks(new char[count * STACK]);
  for (int thread = 0; thread < count; thread++) {
    getcontext(&contexts[thread]);
    contexts[thread].uc_stack.ss_sp = &stacks[thread * STACK];
    contexts[thread].uc_stack.ss_size = STACK;
    makecontext(&contexts[thread], begin, 0);
    if (thread) ready.push_back(thread);
  }
  own = 0;
  swapcontext(&contexts[count], &contexts[0]);
}
