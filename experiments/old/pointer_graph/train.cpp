// Trains the model and prints, as JSON, the processor time of each batch's parts and what lives and
// is resident after each epoch.
//
//   pointer_graph RELEASE DATA EPOCHS BATCH RATE DROPOUT SEED [WEIGHTS]
//
// DATA: four numbers of 32 bits (samples, pixels, hidden, classes), the images as floats, the labels
// as numbers of 32 bits, the parameters as floats. WEIGHTS: where to write the parameters at the end.
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iostream>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>

#include "graph.hpp"

namespace {

struct Data {
  Matrix images;
  std::vector<int> labels;
  std::vector<Matrix> parameters;
};

void read(std::ifstream& file, void* into, std::size_t bytes) {
  if (!file.read(static_cast<char*>(into), static_cast<std::streamsize>(bytes)))
    throw std::runtime_error("the data end too early");
}

Data load(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::int32_t sizes[4];
  read(file, sizes, sizeof sizes);
  const std::size_t samples = sizes[0], pixels = sizes[1], hidden = sizes[2], classes = sizes[3];
  Data data{Matrix(samples, pixels), std::vector<int>(samples), {}};
  read(file, data.images.values.data(), samples * pixels * sizeof(float));
  read(file, data.labels.data(), samples * sizeof(int));
  const std::size_t widths[] = {pixels, hidden, hidden, classes};
  for (int layer = 0; layer < 3; ++layer) {
    data.parameters.emplace_back(widths[layer], widths[layer + 1]);
    data.parameters.emplace_back(1, widths[layer + 1]);
  }
  for (Matrix& one : data.parameters) read(file, one.values.data(), one.values.size() * 4);
  return data;
}

// Seconds of processor time, user and system, of this process.
double processor_time() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

double resident_bytes(const rusage& use) {
  std::ifstream file("/proc/self/statm");
  double whole = 0, resident = 0;
  if (file >> whole >> resident) return resident * static_cast<double>(sysconf(_SC_PAGESIZE));
  return 1024 * static_cast<double>(use.ru_maxrss);  // not Linux: the peak so far
}

// The same product of the same numbers each time, without allocation: what it takes tells how fast
// the machine is at the moment.
class Control {
 public:
  Control(std::size_t rows, std::size_t inner, std::size_t columns)
      : a_(rows, inner), b_(inner, columns), c_(rows, columns) {
    std::fill(a_.values.begin(), a_.values.end(), 0.5f);
    std::fill(b_.values.begin(), b_.values.end(), 0.25f);
  }
  void run() {
    std::fill(c_.values.begin(), c_.values.end(), 0.0f);
    add_product(a_, b_, c_);
  }

 private:
  Matrix a_, b_, c_;
};

using Columns = std::map<std::string, std::vector<double>>;

class Training {
 public:
  Training(Release release, Data data, std::size_t batch, float rate, float dropout, int seed)
      : data_(std::move(data)),
        batch_(batch),
        rate_(rate),
        order_(data_.labels.size()),
        shuffler_(static_cast<unsigned>(seed)),
        graph_(release),
        model_(data_.parameters, dropout, static_cast<unsigned long long>(seed)),
        control_(batch / 2, data_.images.columns, data_.parameters[0].columns) {
    std::iota(order_.begin(), order_.end(), std::size_t{0});
  }

  void epoch() {
    for (std::size_t i = order_.size() - 1; i > 0; --i)
      std::swap(order_[i], order_[shuffler_() % (i + 1)]);
    double loss = 0, subnormal = 0;
    const std::size_t batches = order_.size() / batch_;
    for (std::size_t number = 0; number < batches; ++number)
      step(number * batch_, number + 1 == batches, loss, subnormal);
    rusage use;
    getrusage(RUSAGE_SELF, &use);
    auto& columns = this->columns;
    columns["resident"].push_back(resident_bytes(use));
    columns["user"].push_back(seconds(use.ru_utime));
    columns["system"].push_back(seconds(use.ru_stime));
    columns["faults"].push_back(static_cast<double>(use.ru_minflt));
    columns["loss"].push_back(loss / static_cast<double>(batches));
    columns["subnormal"].push_back(subnormal);
    columns["variables"].push_back(static_cast<double>(Variable::alive));
    columns["functions"].push_back(static_cast<double>(Function::alive));
  }

  const Model& model() const { return model_; }
  Columns columns;

 private:
  // One batch. Timed are: the forward pass, which builds the graph; the backward pass; the release.
  void step(std::size_t first, bool last, double& sum, double& subnormal) {
    Matrix images(batch_, data_.images.columns);
    std::vector<int> labels(batch_);
    for (std::size_t i = 0; i < batch_; ++i) {
      const std::size_t sample = order_[first + i];
      std::memcpy(images.row(i), data_.images.row(sample), images.columns * sizeof(float));
      labels[i] = data_.labels[sample];
    }
    const double start = processor_time();
    VariablePtr loss = model_.loss(graph_, std::move(images), std::move(labels));
    const double built = processor_time();
    graph_.backward(*loss);
    const double passed = processor_time();
    sum += loss->value.values[0];
    if (last) subnormal = subnormal_share(*loss);
    const double before = processor_time();
    graph_.done(std::move(loss));
    loss.reset();
    if (last) graph_.epoch_done();
    const double released = processor_time();
    control_.run();
    const double end = processor_time();
    columns["forward"].push_back(built - start);
    columns["backward"].push_back(passed - built);
    columns["release"].push_back(released - before);
    columns["control"].push_back(end - released);
    model_.descend(rate_);
  }

  Data data_;
  std::size_t batch_;
  float rate_;
  std::vector<std::size_t> order_;
  std::mt19937 shuffler_;
  Graph graph_;
  Model model_;
  Control control_;
};

void print(const Columns& columns) {
  const char* next = "{";
  for (const auto& [name, values] : columns) {
    std::printf("%s\"%s\": [", next, name.c_str());
    for (std::size_t i = 0; i < values.size(); ++i)
      std::printf("%s%.9g", i ? ", " : "", values[i]);
    std::printf("]");
    next = ", ";
  }
  std::printf("}\n");
}

void write(const Model& model, const char* path) {
  std::ofstream file(path, std::ios::binary);
  for (const VariablePtr& one : model.parameters())
    file.write(reinterpret_cast<const char*>(one->value.values.data()),
               static_cast<std::streamsize>(one->value.values.size() * sizeof(float)));
}

}  // namespace

int main(int count, char** given) try {
  if (count < 8) throw std::runtime_error("RELEASE DATA EPOCHS BATCH RATE DROPOUT SEED [WEIGHTS]");
  const std::map<std::string, Release> ways = {
      {"freed", Release::at_once}, {"late", Release::late}, {"cycles", Release::in_cycles}};
  Training training(ways.at(given[1]), load(given[2]), std::strtoul(given[4], nullptr, 10),
                    std::strtof(given[5], nullptr), std::strtof(given[6], nullptr),
                    std::atoi(given[7]));
  const int epochs = std::atoi(given[3]);
  for (int epoch = 0; epoch < epochs; ++epoch) training.epoch();
  print(training.columns);
  if (count > 8) write(training.model(), given[8]);
  return 0;
} catch (const std::exception& error) {
  std::cerr << "pointer_graph: " << error.what() << "\n";
  return 1;
}
