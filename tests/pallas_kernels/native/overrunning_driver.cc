// Reads behind an allocation, for the sanitizer of addresses to find.
#include <cstdio>
#include <cstdlib>

// Apart, so that the size of what it reads is not known where it reads.
__attribute__((noinline)) int ValueAt(const int* values, int i) { return values[i]; }

int main(int argc, char**) {
  int* const values = static_cast<int*>(std::calloc(4, sizeof(int)));
  std::printf("%d\n", ValueAt(values, 3 + argc));
  std::free(values);
  return 0;
}
