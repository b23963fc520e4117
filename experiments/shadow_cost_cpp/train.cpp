// Trains the model and prints, as JSON, the processor time of each epoch's parts, what lives and is
// resident after each epoch, and the parameters at the end.
//
//   train RELEASE SAMPLES PIXELS HIDDEN CLASSES EPOCHS BATCH RATE DROPOUT SEED < DATA
//
// DATA: floats of 32 bits: the images, the labels, the parameters.
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <cstring>

#include "graph.hpp"

// Seconds of processor time, user and system, of this process.
static double processor_time() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

static double resident_bytes(const rusage& use) {
  long whole = 0, resident = 0;
  if (FILE* file = std::fopen("/proc/self/statm", "r")) {
    const int found = std::fscanf(file, "%ld %ld", &whole, &resident);
    std::fclose(file);
    if (found == 2) return static_cast<double>(resident * sysconf(_SC_PAGESIZE));
  }
  return 1024 * static_cast<double>(use.ru_maxrss);  // not Linux: the peak so far
}

static Matrix loaded(std::size_t rows, std::size_t columns) {
  Matrix found(rows, columns);
  if (std::fread(found.values.data(), sizeof(float), rows * columns, stdin) < rows * columns) {
    std::fprintf(stderr, "train: the data end too early\n");
    std::exit(1);
  }
  return found;
}

template <class Number>
static void print(const char* name, const std::vector<Number>& values, char end) {
  std::printf("\"%s\": [", name);
  for (std::size_t i = 0; i < values.size(); ++i) std::printf("%s%.9g", i ? ", " : "", values[i]);
  std::printf("]%c\n", end);
}

int main(int count, char** given) {
  if (count != 11) return 2;
  const bool cycles = !std::strcmp(given[1], "cycles"), late = !std::strcmp(given[1], "late");
  std::size_t sizes[6];
  for (int i = 0; i < 6; ++i) sizes[i] = std::strtoul(given[2 + i], nullptr, 10);
  const auto [samples, pixels, hidden, classes, epochs, batch] = sizes;
  const float rate = std::strtof(given[8], nullptr), dropout = std::strtof(given[9], nullptr);
  const unsigned long long seed = std::strtoull(given[10], nullptr, 10);

  const Matrix images = loaded(samples, pixels), labels = loaded(samples, 1);
  Graph graph{cycles ? Release::in_cycles : late ? Release::late : Release::at_once, {}};
  Model model{dropout, 2 * seed + 0x9E3779B97F4A7C15ULL};
  const std::size_t widths[] = {pixels, hidden, hidden, classes};
  for (int layer = 0; layer < 3; ++layer)
    for (std::size_t rows : {widths[layer], std::size_t{1}})
      model.parameters.push_back(
          std::make_shared<Variable>(loaded(rows, widths[layer + 1]), true));

  // The control: the same product of the same numbers after each batch, without allocation. What
  // it takes tells how fast the machine is at the moment.
  Matrix a(batch / 2, pixels), b(pixels, hidden), c(batch / 2, hidden);
  std::fill(a.values.begin(), a.values.end(), 0.5f);
  std::fill(b.values.begin(), b.values.end(), 0.25f);

  const char* names[] = {"forward", "backward", "release", "control",
                         "loss",    "resident", "faults",  "objects"};
  std::vector<double> columns[8];
  std::vector<std::size_t> order(samples);
  for (std::size_t i = 0; i < samples; ++i) order[i] = i;
  unsigned long long shuffler = 2 * seed + 1;
  for (std::size_t epoch = 0; epoch < epochs; ++epoch) {
    for (std::size_t i = samples - 1; i > 0; --i)
      std::swap(order[i], order[std::size_t(uniform(shuffler) * double(i + 1))]);
    double forward = 0, backward = 0, release = 0, control = 0, sum = 0;
    const std::size_t batches = samples / batch;
    for (std::size_t number = 0; number < batches; ++number) {
      Matrix x(batch, pixels);
      std::vector<int> y(batch);
      for (std::size_t i = 0; i < batch; ++i) {
        const std::size_t sample = order[number * batch + i];
        std::copy(images.row(sample), images.row(sample) + pixels, x.row(i));
        y[i] = static_cast<int>(labels.values[sample]);
      }
      const double start = processor_time();
      VariablePtr loss = model.loss(graph, std::move(x), std::move(y));
      const double built = processor_time();
      graph.backward(*loss);
      const double passed = processor_time();
      sum += loss->value.values[0];
      const double before = processor_time();
      graph.done(std::move(loss), number + 1 == batches);
      loss.reset();
      const double released = processor_time();
      std::fill(c.values.begin(), c.values.end(), 0.0f);
      add_product(a, b, c);
      control += processor_time() - released;
      forward += built - start, backward += passed - built, release += released - before;
      model.descend(rate);
    }
    rusage use;
    getrusage(RUSAGE_SELF, &use);
    const double found[] = {forward, backward, release, control,
                            sum / static_cast<double>(batches), resident_bytes(use),
                            static_cast<double>(use.ru_minflt), static_cast<double>(Counted::alive)};
    for (int i = 0; i < 8; ++i) columns[i].push_back(found[i]);
  }
  std::printf("{");
  for (int i = 0; i < 8; ++i) print(names[i], columns[i], ',');
  std::vector<float> end;
  for (const VariablePtr& one : model.parameters)
    end.insert(end.end(), one->value.values.begin(), one->value.values.end());
  print("parameters", end, '}');
  return 0;
}
