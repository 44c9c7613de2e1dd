// An emulated process that calls functions of a shared library for another process, on that process's memory.
//
// Arguments are passed on as they are, pointers too: a page that is not there is copied from the other process, at the same
// address, when it is touched first. After each call, bytes that changed are written back, and the pages are dropped.
//
//   machine LIBRARY MEMORY    MEMORY: a file descriptor of the other process's /proc/self/mem
//
// Requests on standard input, answers on standard output, all in 64-bit words:
//   0, length, name padded to words    answers the function's address, or 0
//   1, function, result (0 an integer, 1 a float, 2 a double), 8 integers, 8 floats, count, integers on the stack (count)
//                                      answers the result's bits
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace {

constexpr uintptr_t kPage = 4096;
constexpr int kMaxPages = 1 << 18, kOnStack = 16;

int memory;  // file descriptor
std::atomic_flag busy = ATOMIC_FLAG_INIT;
std::atomic<int> count{0};
uintptr_t pages[kMaxPages];      // addresses
char (*copies)[kPage];           // [kMaxPages], as they came

[[noreturn]] void give_up(const char* what, uintptr_t address) {
  dprintf(2, "emulated machine: %s at %#lx\n", what, static_cast<unsigned long>(address));
  _exit(1);
}

bool has(uintptr_t page) {
  for (int i = count - 1; i >= 0; --i) {
    if (pages[i] == page) return true;
  }
  return false;
}

void* map(void* wanted, int protection) {
  return mmap(wanted, kPage, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

void bring(int, siginfo_t* info, void* context) {
  const uintptr_t page = reinterpret_cast<uintptr_t>(info->si_addr) / kPage * kPage;
  if (static_cast<ucontext_t*>(context)->uc_mcontext.pc / kPage * kPage == page) give_up("a call of the other's code", page);
  while (busy.test_and_set(std::memory_order_acquire)) {
  }
  if (!has(page)) {  // no other thread has brought it meanwhile
    if (count == kMaxPages) give_up("too many pages", page);
    if (pread(memory, copies[count], kPage, off_t(page)) != ssize_t(kPage)) give_up("no memory", page);
    // Filled elsewhere first, because other threads read a page as soon as it is there.
    void *wanted = reinterpret_cast<void*>(page), *filled = map(nullptr, PROT_READ | PROT_WRITE);
    std::memcpy(filled, copies[count], kPage);
    if (map(wanted, PROT_NONE) != wanted) give_up("the emulator itself", page);
    if (mremap(filled, kPage, kPage, MREMAP_MAYMOVE | MREMAP_FIXED, wanted) != wanted) give_up("no place", page);
    pages[count] = page;
    count.fetch_add(1);
  }
  busy.clear(std::memory_order_release);
}

// Writes changed bytes back, and no others: the rest of a page may change meanwhile.
void settle() {
  for (int i = 0; i < count; ++i) {
    const char *now = reinterpret_cast<const char*>(pages[i]), *before = copies[i];
    for (uintptr_t at = 0; at < kPage;) {
      if (now[at] == before[at]) {
        ++at;
        continue;
      }
      uintptr_t end = at + 1;
      while (end < kPage && now[end] != before[end]) ++end;
      if (pwrite(memory, now + at, end - at, off_t(pages[i] + at)) != ssize_t(end - at)) give_up("read-only memory", pages[i]);
      at = end;
    }
    munmap(reinterpret_cast<void*>(pages[i]), kPage);
  }
  count = 0;
}

bool take(void* to, size_t bytes) {
  for (char* at = static_cast<char*>(to); bytes > 0;) {
    const ssize_t some = read(0, at, bytes);
    if (some <= 0) return false;
    at += some, bytes -= size_t(some);
  }
  return true;
}
void answer(uint64_t word) {
  if (write(1, &word, sizeof word) != ssize_t(sizeof word)) _exit(1);
}

// Integers beyond the eighth are on the stack, a word each; floats have registers of their own.
struct Arguments {
  uint64_t integers[8];
  double floats[8];
  uint64_t more, stack[kOnStack];
};
template <class Result>
Result call(void* function, const Arguments& a) {
  using W = uint64_t;
  using F = Result (*)(W, W, W, W, W, W, W, W, double, double, double, double, double, double, double, double,  //
                       W, W, W, W, W, W, W, W, W, W, W, W, W, W, W, W);
  const W *i = a.integers, *s = a.stack;
  const double* f = a.floats;
  return reinterpret_cast<F>(function)(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], f[0], f[1], f[2], f[3], f[4], f[5],
                                       f[6], f[7], s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11],
                                       s[12], s[13], s[14], s[15]);
}

}  // namespace

int main(int, char** arguments) {
  memory = std::atoi(arguments[2]);
  copies = static_cast<char(*)[kPage]>(mmap(nullptr, kMaxPages * kPage, PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  void* library = dlopen(arguments[1], RTLD_LAZY);
  if (library == nullptr) {
    std::fprintf(stderr, "emulated machine: %s\n", dlerror());
    return 1;
  }
  struct sigaction action {};
  action.sa_sigaction = bring;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
  for (uint64_t request; take(&request, sizeof request);) {
    if (request == 0) {
      uint64_t length = 0;
      if (!take(&length, sizeof length)) return 1;
      std::string name((length + 7) / 8 * 8, '\0');
      if (!take(name.data(), name.size())) return 1;
      answer(reinterpret_cast<uint64_t>(dlsym(library, name.c_str())));
      continue;
    }
    struct {
      uint64_t function, result;
      Arguments arguments;
    } wanted{};
    const size_t fixed = sizeof wanted - sizeof wanted.arguments.stack;
    if (!take(&wanted, fixed) || wanted.arguments.more > kOnStack) return 1;
    if (!take(wanted.arguments.stack, wanted.arguments.more * 8)) return 1;
    void* function = reinterpret_cast<void*>(wanted.function);
    uint64_t bits = 0;
    if (wanted.result == 0) {
      bits = call<uint64_t>(function, wanted.arguments);
    } else if (wanted.result == 1) {
      const float number = call<float>(function, wanted.arguments);
      std::memcpy(&bits, &number, sizeof number);
    } else {
      const double number = call<double>(function, wanted.arguments);
      std::memcpy(&bits, &number, sizeof number);
    }
    settle();
    answer(bits);
  }
}
