#include "tools/train/optimizer_options.h"

#include "tessera/base/error.h"
#include "tools/cli/validators.h"

namespace tessera::tools {

void add_norm_options(CLI::App& command, OptimizerOptions& o) {
  command.add_option("--norm-type", o.norm_type, "norm of the gradients that is shown and that --clip-norm uses")
      ->check(CLI::IsMember({"1", "2", "3", "inf"}))
      ->capture_default_str();
  command.add_option("--clip-norm", o.clip_norm, "clip gradients to this norm over all parameters (0: off)")
      ->check(finite_number(0))
      ->capture_default_str();
}

void add_optimizer_options(CLI::App& command, OptimizerOptions& o) {
  nn::OptimizerConfig& c = o.optimizer_config;
  command.add_option("--optimizer", o.optimizer, "optimizer of the trainable parameters")
      ->check(CLI::IsMember({"adamw", "adam", "sgd"}))
      ->capture_default_str();
  command.add_option("--momentum", c.momentum, "momentum of sgd")->check(finite_number(0))->capture_default_str();
  command.add_flag("--nesterov", c.nesterov, "use Nesterov momentum in sgd");
  command.add_flag("--amsgrad", c.amsgrad, "use the largest second moment so far in adam and adamw");
}

void add_optimizer_settings(CLI::App& command, OptimizerOptions& o) {
  nn::OptimizerConfig& c = o.optimizer_config;
  command.add_option("--betas", o.betas, "decay rates of adam's moments (default: 0.9,0.999)")
      ->type_name("A,B")
      ->delimiter(',')
      ->expected(2)
      ->check(finite_number(0));
  command.add_option("--eps", c.eps, "epsilon in adam's denominator")->check(finite_number(0))->capture_default_str();
  command
      .add_option("--weight-decay", c.weight_decay,
                  "weight decay, except for norms and biases (default: 0.01 for adamw, else 0)")
      ->check(finite_number(0));
  command.add_flag("--maximize", c.maximize, "maximize the loss instead of minimizing it");
}

void add_schedule_options(CLI::App& command, OptimizerOptions& o) {
  command.add_option("--lr", o.lr, "peak learning rate of the schedule")->check(finite_number())->capture_default_str();
  command.add_option("--schedule", o.schedule, "learning rate after the warm-up")
      ->check(CLI::IsMember({"constant", "cosine"}))
      ->capture_default_str();
  command.add_option("--warmup", o.warmup, "steps of linear warm-up")
      ->transform(whole_number(0, 1ULL << 40))
      ->capture_default_str();
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
