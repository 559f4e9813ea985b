#include "tools/results/why.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/strategy.h"
#include "tools/cli/output.h"

namespace tessera::tools {
namespace {

struct TermDefinition {
  const char* name;
  const char* meaning;
  double (*of)(const StepParts&);
};

constexpr TermDefinition kWhyTerms[] = {
    {"volume", "bytes sent, at the rate of the links", [](const StepParts& p) { return p.volume; }},
    {"latency", "messages in a row, at the latency of the links", [](const StepParts& p) { return p.latency; }},
    {"overlap", "less of both hidden behind other work", [](const StepParts& p) { return -p.hidden(); }},
    {"optimizer", "the update", [](const StepParts& p) { return p.optimizer; }},
    {"contention", "forward and backward themselves", [](const StepParts& p) { return p.compute; }},
    {"copies", "submitting operations, copies beside them", [](const StepParts& p) { return p.issue; }},
    {"late", "waits until the last rank had called", [](const StepParts& p) { return p.late; }},
    {"transport", "waits after the links had passed all", [](const StepParts& p) { return p.transport; }},
    {"rest", "everything else", [](const StepParts& p) { return p.rest; }},
};

/// The middle half of the rounds, by their gaps; all of up to three.
std::vector<std::size_t> middle_half(const std::vector<double>& gaps) {
  std::vector<std::size_t> order(gaps.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&](std::size_t round) { return gaps[round]; });
  const auto trimmed = static_cast<std::ptrdiff_t>(gaps.size() / 4);
  return {order.begin() + trimmed, order.end() - trimmed};
}

StepParts mean_of_rounds(std::span<const StepParts> rounds, const std::vector<std::size_t>& chosen) {
  return mean_of(each_of(chosen, [&](std::size_t round) { return rounds[round]; }));
}

std::string signed_ms(double ms) { return fmt::format("{:+.3f}", std::abs(ms) < 5e-4 ? 0.0 : ms); }

std::string terms_text(const Why& why) {
  const bool measured = why.coverage >= 0.95;  // so that intervals say something
  std::size_t name = 0, interval = 0;
  for (const WhyTerm& term : why.terms) name = std::max(name, term.name.size());
  const auto interval_of = [&](const WhyTerm& term) {
    return measured ? fmt::format("({} to {})", signed_ms(term.interval.low), signed_ms(term.interval.high)) : "";
  };
  for (const WhyTerm& term : why.terms) interval = std::max(interval, interval_of(term).size());
  std::string text;
  const auto line = [&](std::string_view first, double ms, std::string_view between, std::string_view last) {
    text += fmt::format("  {:<{}}  {:>10}  {:<{}}{}{}\n", first, name, signed_ms(ms), between, interval,
                        measured ? "  " : "", last);
  };
  for (std::size_t i = 0; i < why.terms.size(); ++i) {
    const WhyTerm& term = why.terms[i];
    const char* const zero = term.shown() ? "" : measured ? "may be 0: " : "";
    line(term.name, term.ms, interval_of(term), zero + std::string(kWhyTerms[i].meaning));
  }
  line("sum", why.gap_ms, "", fmt::format("{:.3f} to {:.3f} ms", why.from_ms, why.to_ms));
  return text;
}

std::string helps_text(const Why& why) {
  if (why.helps.empty()) return "";
  std::vector<std::vector<std::string>> rows = {{"what would help " + why.to, "step ms", "change", "gap", "peak"}};
  const WhyHelp& now = why.helps.front();
  for (const WhyHelp& help : why.helps)
    rows.push_back({"  " + help.change, fmt::format("{:.3f}", help.step_ms),
                    &help == &now ? "" : signed_ms(help.step_ms - now.step_ms), signed_ms(help.gap_ms),
                    human_bytes(help.peak_bytes)});
  return "Simulated, one change each, so these rows don't add up; the gap is that to " + why.from +
         " over the same links:\n" + text_table(rows);
}

std::size_t find_run(const std::string& name, const std::vector<std::string>& runs) {
  const std::string strategy = strategy_of_run(name);
  const std::string known_as =
      fsdp::parse_strategy(strategy, fsdp::CollectiveRegistry::built_in()).name + name.substr(strategy.size());
  const auto found = std::ranges::find(runs, known_as);
  if (found == runs.end())
    throw base::InvalidUsage(
        fmt::format("--why: '{}' is not among the runs; use two of: {}", name, joined_by(runs, ", ")));
  return static_cast<std::size_t>(found - runs.begin());
}

}  // namespace

Why explain_gap(std::span<const StepParts> from, std::span<const StepParts> to) {
  if (from.empty() || from.size() != to.size())
    throw base::InvalidUsage("explain_gap: " + std::to_string(from.size()) + " and " + std::to_string(to.size()) +
                             " rounds; give as many of both, at least one");
  std::vector<double> gaps;
  for (std::size_t i = 0; i < from.size(); ++i) gaps.push_back(to[i].step() - from[i].step());
  const std::vector<std::size_t> chosen = middle_half(gaps);
  const StepParts a = mean_of_rounds(from, chosen), b = mean_of_rounds(to, chosen);
  Why why;
  why.from_ms = a.step();
  why.to_ms = b.step();
  why.gap_ms = b.step() - a.step();
  why.rounds = chosen.size();
  why.coverage = median_interval(gaps).coverage;
  for (const TermDefinition& term : kWhyTerms) {
    std::vector<double> by_round;
    for (std::size_t i = 0; i < from.size(); ++i) by_round.push_back(term.of(to[i]) - term.of(from[i]));
    why.terms.push_back({term.name, term.of(b) - term.of(a), median_interval(std::move(by_round))});
  }
  return why;
}

nlohmann::ordered_json to_json(const Why& why) {
  nlohmann::ordered_json terms, intervals, helps = nlohmann::ordered_json::array();
  for (const WhyTerm& term : why.terms) {
    terms[term.name] = term.ms;
    intervals[term.name] = {term.interval.low, term.interval.high};
  }
  for (const WhyHelp& help : why.helps)
    helps.push_back(
        {{"change", help.change}, {"gap_ms", help.gap_ms}, {"step_ms", help.step_ms}, {"peak_bytes", help.peak_bytes}});
  return {{"from", why.from},         {"to", why.to},           {"gap_ms", why.gap_ms},
          {"terms", terms},           {"intervals", intervals}, {"helps", helps},
          {"from_ms", why.from_ms},   {"to_ms", why.to_ms},     {"rounds", why.rounds},
          {"coverage", why.coverage}, {"link", why.link}};
}

Why parse_why(const base::JsonReader& json) {
  Why why{.from = json.at("from"),
          .to = json.at("to"),
          .from_ms = json.at("from_ms"),
          .to_ms = json.at("to_ms"),
          .gap_ms = json.at("gap_ms"),
          .rounds = json.at("rounds"),
          .coverage = json.value("coverage", 0.0),  // older files have none
          .link = json.at("link")};
  for (const TermDefinition& term : kWhyTerms) {
    const base::JsonReader interval = json.at("intervals").at(term.name);
    why.terms.push_back({term.name, json.at("terms").at(term.name), {0, interval.at(0), interval.at(1), 0}});
  }
  for (const base::JsonReader& help : json.at("helps").elements())
    why.helps.push_back({help.at("change"), help.at("step_ms"), help.at("gap_ms"), help.at("peak_bytes")});
  return why;
}

std::string why_text(const Why& why) {
  return fmt::format("Why a step of {} takes {:.3f} ms {} than one of {} (links of {}{}):\n", why.to,
                     std::abs(why.gap_ms), why.gap_ms < 0 ? "less" : "more", why.from, why.link,
                     why.coverage >= 0.95 ? fmt::format("; means of the middle {} rounds", why.rounds)
                     : why.rounds > 1
                         ? fmt::format("; means of {} rounds, too few to tell terms from noise", why.rounds)
                         : "") +
         terms_text(why) + helps_text(why);
}

std::string strategy_of_run(const std::string& name) { return name.substr(0, name.find(' ')); }

std::vector<std::string> strategies_for_why(const std::vector<std::string>& names, std::vector<std::string> asked) {
  if (names.empty()) return asked;
  if (names.size() != 2)
    throw base::InvalidUsage(fmt::format("--why needs two runs, such as ddp,fsdp, not {}", names.size()));
  if (!asked.empty()) return asked;
  asked = {strategy_of_run(names[0]), strategy_of_run(names[1])};
  if (asked[0] == asked[1]) asked.pop_back();
  return asked;
}

std::pair<std::size_t, std::size_t> find_runs(const std::vector<std::string>& names,
                                              const std::vector<std::string>& runs) {
  const std::pair places{find_run(names[0], runs), find_run(names[1], runs)};
  if (places.first == places.second)
    throw base::InvalidUsage(fmt::format("--why {},{}: both are the same run; give two", names[0], names[1]));
  return places;
}

}  // namespace tessera::tools
