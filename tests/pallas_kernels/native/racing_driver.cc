// Two threads write one int: a sanitizer of threads that says nothing about this would say nothing about anything.
#include <cstdio>
#include <thread>

int main() {
  int value = 0;
  std::thread other([&value] { value++; });
  value++;
  other.join();
  std::printf("%d\n", value);
  return 0;
}
