// Questions that learners ask about a step, with answers from its facts.
#pragma once

#include <string>
#include <vector>

#include "tools/explain/explanation.h"

namespace tessera::tools {

struct Question {
  std::string name;  ///< of --question
  std::string text;
  std::string answer;   ///< "": this step has no facts for an answer
  std::string section;  ///< that shows the facts
  std::string lesson;   ///< file in docs/learn, without its ending
};

/// All questions, in the order of a step.
std::vector<Question> questions_about(const Explanation& explanation);

/// The names and texts of all questions, without answers.
std::string question_list();

/// Throws InvalidUsage, with the known names, if there is no such question.
void check_question(const std::string& name);

}  // namespace tessera::tools
