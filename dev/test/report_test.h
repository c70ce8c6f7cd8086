// Runs as a trainer would have written them, and their pages.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include "browser.h"
#include "llmc/report/report.h"

// What a trainer would have written.
struct LogOf {
  std::string wiring = "plain";
  int64_t seed = 1, planned = 10;
  int kv_bytes = 512, flops = 1000;
  std::string more = "";  // fields of the description, each with a comma before it

  std::string head() const {
    return format(
        R"({"run":{"model":"d12","num_layers":4,"num_heads":4,"channels":32,"wiring":"%s","num_parameters":10000,)"
        R"("micro_batch":2,)"
        R"("seq_len":8,"grad_accum_steps":1,"ranks":1,"steps":%lld,"learning_rate":0.001,"seed":%lld,)"
        R"("flops_per_token":%d,)"
        R"("kv_bytes_per_token":%d,"precision":"fp32","device":"CPU","memory":{"weights":4000,"activations":12000},)"
        R"("process":{"host":"node1","cpu":"A CPU","processors":2,"ranks":1,"gemm_peak":1000000}%s}})"
        "\n",
        wiring.c_str(), (long long)planned, (long long)seed, flops, kv_bytes, more.c_str());
  }
  static std::string step(int64_t n, const std::string& loss, const std::string& norm = "1.5") {
    return format(R"({"step":%lld,"loss":%s,"grad_norm":%s,"lr":0.001,"ms":20,"data_ms":0,"tokens_per_second":800,)"
                  R"("limit_ms":16})"
                  "\n",
                  (long long)n, loss.c_str(), norm.c_str());
  }
  static std::string val(int64_t n, const std::string& loss) {
    return format("{\"step\":%lld,\"val_loss\":%s}\n", (long long)n, loss.c_str());
  }
  static std::string sample(int64_t n, const std::string& text) {
    return format("{\"step\":%lld,\"sample\":\"%s\"}\n", (long long)n, text.c_str());
  }
  static std::string steps(int64_t from, int64_t to, double loss = 3) {
    std::string text;
    for (int64_t n = from; n <= to; n++) text += step(n, std::to_string(loss - 0.01 * double(n)));
    return text;
  }
};

class Report : public CommandLine {
 protected:
  std::string write_run(const std::string& name, const std::string& log) const {
    fs::create_directories(in(name));
    write_file(in(name + "/log.jsonl"), log);
    return in(name);
  }
  RunHistory read(const std::string& log) const { return read_run(write_run("run", log)); }
  static bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
  // A finished run of 10 steps: its folder is called as its wiring and seed.
  RunHistory read_finished(const std::string& wiring, int64_t seed, const std::string& loss,
                           const std::string& speed = "800") const {
    LogOf of;
    of.wiring = wiring, of.seed = seed;
    std::string steps = LogOf::steps(1, 10);
    for (size_t at = 0; (at = steps.find(":800", at)) != std::string::npos; at++) steps.replace(at + 1, 3, speed);
    return read_run(write_run(wiring + std::to_string(seed), of.head() + steps + LogOf::val(10, loss)));
  }
  // A finished run that `of` describes, in a folder of this name.
  RunHistory finished_with(const std::string& name, LogOf of, const std::string& loss) const {
    return read_run(write_run(name, of.head() + LogOf::steps(1, 10) + LogOf::val(10, loss)));
  }
  static size_t count(const std::string& text, const std::string& part) {
    size_t n = 0;
    for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) n++;
    return n;
  }
  // The charts of a page.
  static json charts(const std::string& page) {
    const std::string begin = "id=\"data\">";
    const size_t at = page.find(begin) + begin.size();
    return json::parse(page.substr(at, page.find("</script>", at) - at)).at("charts");
  }
};
