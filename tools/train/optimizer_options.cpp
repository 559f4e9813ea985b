#include "tools/train/optimizer_options.h"

#include "tessera/base/error.h"
#include "tools/cli/validators.h"

namespace tessera::tools {

void add_norm_options(CLI::App& command, OptimizerOptions& o) {
  add_option(command, "--norm-type", o.norm_type, "norm of the gradients that is shown and that --clip-norm uses",
             one_of({"1", "2", "3", "inf"}));
  add_option(command, "--clip-norm", o.clip_norm, "clip gradients to this norm over all parameters (0: off)",
             finite_number(0));
}

void add_optimizer_options(CLI::App& command, OptimizerOptions& o) {
  nn::OptimizerConfig& c = o.optimizer_config;
  add_option(command, "--optimizer", o.optimizer, "optimizer of the trainable parameters",
             one_of({"adamw", "adam", "sgd"}));
  add_option(command, "--momentum", c.momentum, "momentum of sgd", finite_number(0));
  command.add_flag("--nesterov", c.nesterov, "use Nesterov momentum in sgd");
  command.add_flag("--amsgrad", c.amsgrad, "use the largest second moment so far in adam and adamw");
}

void add_optimizer_settings(CLI::App& command, OptimizerOptions& o) {
  nn::OptimizerConfig& c = o.optimizer_config;
  add_option(command, "--betas", o.betas, "decay rates of adam's moments (default: 0.9,0.999)",
             list_of("A,B", finite_number(0)))
      ->expected(2);
  add_option(command, "--eps", c.eps, "epsilon in adam's denominator", finite_number(0));
  add_option(command, "--weight-decay", c.weight_decay,
             "weight decay, except for norms and biases (default: 0.01 for adamw, else 0)", finite_number(0));
  command.add_flag("--maximize", c.maximize, "maximize the loss instead of minimizing it");
}

void add_schedule_options(CLI::App& command, OptimizerOptions& o) {
  add_option(command, "--lr", o.lr, "peak learning rate of the schedule", finite_number());
  add_option(command, "--schedule", o.schedule, "learning rate after the warm-up", one_of({"constant", "cosine"}));
  add_option(command, "--warmup", o.warmup, "steps of linear warm-up", whole_number(0, 1ULL << 40));
}

nn::OptimizerConfig optimizer_of(const OptimizerOptions& o) {
  nn::OptimizerConfig optimizer = o.optimizer_config;
  optimizer.kind = nn::parse_optimizer(o.optimizer);
  optimizer.beta1 = o.betas.at(0);
  optimizer.beta2 = o.betas.at(1);
  base::validate(optimizer);
  return optimizer;
}

nn::LrSchedule schedule_of(const OptimizerOptions& o, std::int64_t steps) {
  if (!(o.lr > 0)) throw base::InvalidUsage("--lr " + std::to_string(o.lr) + ": a learning rate is above 0");
  nn::LrSchedule schedule{.kind = nn::parse_schedule(o.schedule), .peak = o.lr, .warmup = o.warmup, .steps = steps};
  if (steps > 0) nn::validate(schedule);
  return schedule;
}

nn::kernels::Norm norm_of(const OptimizerOptions& o) {
  const std::string& type = o.norm_type;
  if (type == "inf") return nn::kernels::Norm::infinity;
  return type == "1" ? nn::kernels::Norm::one : type == "3" ? nn::kernels::Norm::three : nn::kernels::Norm::two;
}

}  // namespace tessera::tools
