// The text format that selects decorators.
#include "tests/plugins/decorators/support.h"

namespace tessera::decorators_test {
namespace {

std::string error_for(const std::string& spec) {
  return error_of([&] { run_threads(1, decorated(spec), [](Communicator&) {}); });
}

TEST(DecoratorSpec, ParsesValidSpecs) {
  for (const char* spec : {"", "trace", "delay:1ms", "delay:1ms,seed=7,bandwidth=1G,op=all_gather",
                           "fault:kill@99,rank=0", "delay:1ms;trace;fault:drop@99"})
    EXPECT_EQ(error_for(spec), "") << spec;
}

TEST(DecoratorSpec, ErrorsNameInvalidPart) {
  EXPECT_EQ(error_for("slow"), "InvalidUsage: decorator 'slow': unknown; known: delay fault trace");
  EXPECT_EQ(error_for("trace;"), "InvalidUsage: decorator '': unknown; known: delay fault trace");
  EXPECT_EQ(error_for("delay"), "InvalidUsage: decorator 'delay': needs a time, such as delay:2ms");
  EXPECT_EQ(error_for("delay:1ms,sed=1"),
            "InvalidUsage: decorator 'delay:1ms,sed=1': unknown or repeated setting 'sed'");
  EXPECT_EQ(error_for("delay:1ms,seed=1,seed=2"),
            "InvalidUsage: decorator 'delay:1ms,seed=1,seed=2': unknown or repeated setting 'seed'");
  EXPECT_EQ(error_for("delay:1ms,seed"),
            "InvalidUsage: decorator 'delay:1ms,seed': 'seed' is not of the form key=value");
  EXPECT_EQ(error_for("delay:1ms,seed="), "InvalidUsage: decorator 'delay:1ms,seed=': seed has no value");
  EXPECT_EQ(error_for("fault:kill"),
            "InvalidUsage: decorator 'fault:kill': needs drop@CALL, kill@CALL or corrupt@CALL");
  EXPECT_EQ(error_for("fault:slow@1"),
            "InvalidUsage: decorator 'fault:slow@1': needs drop@CALL, kill@CALL or corrupt@CALL");
  for (const char* spec : {"delay:2parsecs", "delay:1ms,bandwidth=fast", "delay:1ms,op=all_red", "fault:kill@0",
                           "fault:kill@x", "fault:kill@1,rank=1", "trace:x,y=1"})
    EXPECT_TRUE(error_for(spec).starts_with("InvalidUsage: ")) << spec << ": " << error_for(spec);
}

}  // namespace
}  // namespace tessera::decorators_test
