// Writes the directory from which the scripts of this directory compute golden numbers: a preset with its initial
// values of seed 0.
//   write_initial MODEL DIR
#include <cstdio>

#include "tessera/nn/hf_checkpoint.h"
#include "tessera/nn/models/causal_model.h"

using namespace tessera::nn;

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: write_initial MODEL DIR\n");
    return 2;
  }
  try {
    Context context;
    const ModelConfig config = preset(arguments[1]);
    const auto model = make_model(context, config);
    model->materialize(0);
    std::vector<SafetensorsTensor> tensors;
    for (const auto& parameter : model->parameters()) tensors.push_back({parameter->name(), parameter->shape()});
    HfCheckpointWriter writer(arguments[2], config, tensors);
    for (const auto& parameter : model->parameters())
      writer.write(parameter->name(), {0, parameter->count()}, parameter->tensor().data<float>());
    writer.commit();
  } catch (const Error& error) {
    std::fprintf(stderr, "write_initial: %s\n", error.what());
    return 1;
  }
  return 0;
}
