// What every program does around its work: standard streams, errors and exit status; files that it writes, whatever is
// there already; names and JSON from elsewhere.
// COVERS llmc/base/files llmc/base/json.h llmc/base/message.h llmc/base/program llmc/base/utf8.h
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>
#include "files.h"
#include "helpers.h"
#include "llmc/base/files.h"
#include "llmc/base/json.h"
#include "llmc/base/message.h"
#include "llmc/base/program.h"
#include "llmc/base/utf8.h"

namespace fs = std::filesystem;

// ----------------------------------------------------------------------------
// Programs

// Runs a program in a process of its own.
class Program : public FolderTest {
 protected:
  // Returns waitpid's status of a process whose stdout and stderr are files "stdout" and "stderr" and which ends with
  // what `main` returns.
  int run(const std::function<int()>& main, const std::string& stdout_path = "") const {
    fflush(nullptr);  // what GoogleTest has printed is not printed again by the child
    const pid_t child = fork();
    if (child == 0) {
      signal(SIGPIPE, SIG_DFL);
      redirect(STDOUT_FILENO, stdout_path.empty() ? in("stdout") : stdout_path);
      redirect(STDERR_FILENO, in("stderr"));
      const int status = main();
      fflush(nullptr);
      _exit(status);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return status;
  }
  static void redirect(int fd, const std::string& path) {
    dup2(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666), fd);
  }
  std::string error_after(const std::function<int()>& body) const {
    const int status = run([&] { return run_program(body); });
    EXPECT_TRUE(WIFEXITED(status)) << status;
    EXPECT_EQ(WEXITSTATUS(status), 1);
    return read_file(in("stderr"));
  }
};

TEST_F(Program, AnExceptionOfAnyLibraryIsAnError) {
  EXPECT_EQ(error_after([]() -> int { user_error("%s: no such file", "x"); }), "error: x: no such file\n");
  EXPECT_EQ(error_after([]() -> int { return int(fs::file_size(std::string(300, 'n'))); }),
            "error: " + std::string(300, 'n') + ": File name too long\n");
  EXPECT_EQ(error_after([]() -> int { throw std::bad_alloc(); }).rfind("error: out of memory", 0), 0u);
  EXPECT_NE(error_after([]() -> int { return nlohmann::json::parse("{")["a"].get<int>(); }).find("parse_error"),
            std::string::npos);
  EXPECT_NE(error_after([]() -> int { return std::stoi(""); }).find("error: stoi"), std::string::npos);
}

TEST_F(Program, ItsStatusIsItsOwnIfNothingIsWrong) {
  for (int expected : {0, 3, 143}) {
    const int status = run([=] { return run_program([=] { return printf("out\n"), expected; }); });
    EXPECT_EQ(WEXITSTATUS(status), expected);
    EXPECT_EQ(read_file(in("stdout")) + read_file(in("stderr")), "out\n");
  }
}

TEST_F(Program, OutputThatCannotBeWrittenIsAnError) {
  const std::string message = "error: standard output cannot be written: No space left on device; what was printed is "
                              "incomplete\n";
  int status = run([] { return run_program([] { return printf("out\n"), 0; }); }, "/dev/full");
  EXPECT_EQ(WEXITSTATUS(status), 1);
  EXPECT_EQ(read_file(in("stderr")), message);
  // What stdio has dropped before counts, too, although nothing is left to be written.
  status = run(
      [] {
        return run_program([] {
          printf("out\n");
          fflush(stdout);
          errno = ENOTDIR;  // of something else
          return 0;
        });
      },
      "/dev/full");
  EXPECT_EQ(WEXITSTATUS(status), 1);
  EXPECT_EQ(read_file(in("stderr")), "error: standard output cannot be written; what was printed is incomplete\n");
  // A stream of lines is noticed at its first.
  status = run(
      [] {
        return run_program([] {
          printf("line\n");
          flush_output();
          fprintf(stderr, "went on");
          return 0;
        });
      },
      "/dev/full");
  EXPECT_EQ(WEXITSTATUS(status), 1);
  EXPECT_EQ(read_file(in("stderr")), message);
  // A run ignores that its reader has gone, but not that the disk is full.
  status = run([] { return run_program([] { return printf("out\n"), 0; }, ReaderGone::is_ignored); }, "/dev/full");
  EXPECT_EQ(WEXITSTATUS(status), 1);
  EXPECT_EQ(read_file(in("stderr")), message);
  // A full disk is no error if nothing was printed.
  EXPECT_EQ(run([] { return run_program([] { return 0; }); }, "/dev/full"), 0);
}

TEST_F(Program, AFilterEndsWithItsReaderAndARunDoesNot) {
  auto run_without_reader = [&](ReaderGone reader_gone) {
    return run([=] {
      int ends[2];
      if (pipe(ends) != 0) return 99;
      close(ends[0]);
      dup2(ends[1], STDOUT_FILENO);
      return run_program(
          [&] {
            printf("out\n");
            fflush(stdout);
            write_file(in("finished"), "");
            return 0;
          },
          reader_gone);
    });
  };
  int status = run_without_reader(ReaderGone::ends);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGPIPE) << status;
  EXPECT_FALSE(fs::exists(in("finished")));
  status = run_without_reader(ReaderGone::is_ignored);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(fs::exists(in("finished")));
  EXPECT_EQ(read_file(in("stderr")), "");
}

TEST_F(Program, AtTheFileSizeLimitAWriteIsAnError) {
  const std::string error = error_after([&]() -> int {
    const rlimit limit = {4096, 4096};
    setrlimit(RLIMIT_FSIZE, &limit);
    write_file_durably(in("file"), std::string(5000, 'x'));
    return 0;
  });
  EXPECT_EQ(error, "error: " + in("file") + ": cannot be written: File too large\n");
  EXPECT_FALSE(fs::exists(in("file")));
}

TEST_F(Program, ClosedStreamsAreNoFilesOfTheProgram) {
  for (const std::vector<int>& closed : std::vector<std::vector<int>>{{0}, {1}, {2}, {0, 1, 2}}) {
    const int status = run([&] {
      for (int fd : closed) close(fd);
      return run_program([&] {
        const int file = open(in("file").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
        printf("out\n");
        fprintf(stderr, "err\n");
        return file > STDERR_FILENO && getchar() == EOF ? 0 : 1;
      });
    });
    EXPECT_EQ(status, 0) << closed.size() << " closed, the first is " << closed[0];
    EXPECT_EQ(read_file(in("file")), "");
  }
}

TEST_F(Program, AnErrorIsToldBeforeItIsPrinted) {
  run([&] {
    return run_program([]() -> int { user_error("broken"); }, ReaderGone::ends,
                       [](const std::string& text) { fprintf(stderr, "told %s\n", text.c_str()); });
  });
  EXPECT_EQ(read_file(in("stderr")), "told broken\nerror: broken\n");
}

TEST_F(Program, AnErrorComesAfterWhatHasBeenPrinted) {
  run([&] {
    dup2(STDERR_FILENO, STDOUT_FILENO);
    return run_program([]() -> int {
      printf("printed\n");
      user_error("broken");
    });
  });
  EXPECT_EQ(read_file(in("stderr")), "printed\nerror: broken\n");
}

TEST(Message, IsSafeToPrint) {
  EXPECT_EQ(message_line("error", "a\x1b[31m\x07 \xff\nerror: b\xc2\x9b"), "error: a?[31m? \xEF\xBF\xBD?error: b?\n");
  const std::string long_one = message_line("warning", "ab" + std::string(1000000, 'x'));
  EXPECT_LT(long_one.size(), 5000u);
  EXPECT_EQ(long_one.substr(0, 12), "warning: abx");
}

// ----------------------------------------------------------------------------
// Files that are written

class Output : public FolderTest {};

TEST_F(Output, HasANameOfItsOwnUntilItIsComplete) {
  write("page", "old");
  {
    OutputFile first(in("page")), second(in("page"));
    first.write("the first", 9);
    second.write("second", 6);
    EXPECT_EQ(read_file(in("page")), "old");
    EXPECT_EQ(names_in(folder).size(), 3u);
    for (const std::string& name : names_in(folder)) EXPECT_EQ(is_unfinished_output(name), name != "page") << name;
    second.finish();
    EXPECT_EQ(read_file(in("page")), "second");
    first.finish();
    EXPECT_EQ(read_file(in("page")), "the first");
    OutputFile given_up(in("page"));
    given_up.write("third", 5);
  }
  EXPECT_EQ(read_file(in("page")), "the first");
  EXPECT_EQ(names_in(folder), std::set<std::string>{"page"});
}

TEST_F(Output, OfManyProcessesAtOnceIsOneOfThem) {
  std::vector<pid_t> children;
  for (int i = 0; i < 8; i++) {
    children.push_back(fork());
    if (children.back() != 0) continue;
    try {
      for (int n = 0; n < 30; n++) write_file_durably(in("page"), std::string(size_t(10000 + i), char('a' + i)));
    } catch (const UserError& e) {
      fprintf(stderr, "%s\n", e.what());
      _exit(1);
    }
    _exit(0);
  }
  for (pid_t child : children) {
    int status = 1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  const std::string page = read_file(in("page"));
  ASSERT_GE(page.size(), 10000u);
  EXPECT_EQ(page, std::string(page.size(), char('a' + int(page.size() - 10000))));
  EXPECT_EQ(names_in(folder), std::set<std::string>{"page"});
}

// Another process makes the file while this one looks what is there.
TEST_F(Output, ThatAppearsMeanwhileIsNoLinkThatLeadsNowhere) {
  const auto name = [](int n) { return "page" + std::to_string(n); };
  std::atomic<int> wanted{0};
  std::thread other([&] {
    for (int n = 1; n <= 100; n++) {
      while (wanted < n) std::this_thread::yield();
      write(name(n), "");
    }
  });
  int errors = 0;
  for (int n = 1; n <= 100; n++) {
    wanted = n;
    while (!path_exists(in(name(n)))) errors += error_of([&] { check_output(in(name(n)), {}); }) != "";
  }
  other.join();
  EXPECT_EQ(errors, 0);
}

TEST_F(Output, OfKilledProcessesIsRemovedAndOfOthersIsNot) {
  write("page.tmp.1.0", "left");
  write("page.tmp.1", "of the user");
  write("page.tmp.1.x", "of the user");
  write("other.tmp.1.0", "left by another program");
  fs::create_directory(in("page.tmp.2.0"));
  write("page.tmp.2.0/file", "left");
  const OutputFile open_one(in("page"));
  write_file_durably(in("page"), "text");
  std::set<std::string> names = names_in(folder);
  EXPECT_EQ(names.size(), 5u);
  for (const char* kept : {"page", "page.tmp.1", "page.tmp.1.x", "other.tmp.1.0"})
    EXPECT_EQ(names.erase(kept), 1u) << kept;
  EXPECT_TRUE(is_unfinished_output(*names.begin())) << "the one that is open";
}

TEST_F(Output, KeepsLinksPermissionsAndDevices) {
  write("target", "old");
  chmod(in("target").c_str(), 0640);
  fs::create_symlink("target", in("link"));
  write_file_durably(in("link"), "new");
  EXPECT_TRUE(fs::is_symlink(in("link")));
  EXPECT_EQ(read_file(in("target")), "new");
  EXPECT_EQ(fs::status(in("target")).permissions(), fs::perms(0640));

  ASSERT_EQ(mkfifo(in("pipe").c_str(), 0666), 0);
  std::string read;
  std::thread reader([&] { read = read_file(in("pipe")); });
  write_file_durably(in("pipe"), "through");
  reader.join();
  EXPECT_EQ(read, "through");
  EXPECT_TRUE(fs::is_fifo(in("pipe")));

  fs::create_symlink("/dev/null", in("null"));
  write_file_durably(in("null"), "text");
  EXPECT_TRUE(fs::is_symlink(in("null")));
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  fs::create_symlink("/dev/full", in("full"));
  EXPECT_ERROR(write_file_durably(in("full"), "text"), "full: cannot be written: No space left on device");
  EXPECT_EQ(names_in(folder), (std::set<std::string>{"target", "link", "pipe", "null", "full"}));
}

// Standard output may be a file that has something in it, and gets more.
TEST_F(Output, ToStandardOutputIsBetweenWhatIsPrinted) {
  fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    dup2(open(in("page").c_str(), O_WRONLY | O_CREAT, 0666), STDOUT_FILENO);
    printf("before ");
    write_file_durably("/dev/stdout", "page");
    printf(" after");
    fflush(stdout);
    _exit(0);
  }
  waitpid(child, nullptr, 0);
  EXPECT_EQ(read_file(in("page")), "before page after");
}

TEST_F(Output, ToAPipeAsStandardOutputIsReadFromIt) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    _exit(error_of([] { write_file_durably("/dev/stdout", "p"); }) == "" ? 0 : 1);
  }
  close(ends[1]);
  int status = 1;
  waitpid(child, &status, 0);
  char text[8];
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read(ends[0], text, sizeof text), 1);
  close(ends[0]);
}

// A pipe takes 64 KiB at a time from a process that signals interrupt.
TEST_F(Output, OfWhichTheSystemTakesAPartIsWrittenToItsEnd) {
  std::string bytes;
  for (int i = 0; i < 300000; i++) bytes += char(i * 7 % 251);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    struct sigaction interrupt = {};
    interrupt.sa_handler = [](int) {};
    sigaction(SIGALRM, &interrupt, nullptr);
    const itimerval every = {{0, 1000}, {0, 1000}};  // us
    setitimer(ITIMER_REAL, &every, nullptr);
    _exit(write_all(ends[1], bytes.data(), bytes.size()) == bytes.size() ? 0 : 1);
  }
  close(ends[1]);
  std::string read_bytes, block(10000, '\0');
  for (ssize_t n; (n = read(ends[0], &block[0], block.size())) > 0; usleep(2000))
    read_bytes.append(block, 0, size_t(n));
  close(ends[0]);
  int status = 1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(read_bytes == bytes) << read_bytes.size() << " bytes";
}

// Names that no file can be written to; `exists` is one that a folder has.
TEST_F(Output, ThatCannotBeIsRefusedBeforeAnythingIsWritten) {
  write("file", "text");
  fs::create_symlink("loop2", in("loop"));
  fs::create_symlink("loop", in("loop2"));
  fs::create_symlink("nowhere", in("dangling"));
  const std::set<std::string> before = names_in(folder);
  const struct {
    std::string path, message;
  } cases[] = {{folder, "is a folder"},
               {in("loop"), "loop: cannot be written: Too many levels of symbolic links"},
               {in("loop/x"), "loop/x: cannot be written: Too many levels of symbolic links"},
               {in("dangling"), "is a link that leads nowhere"},
               {in("file/x"), "file/x: cannot be written: Not a directory"},
               {in("nowhere/x"), "nowhere/x: cannot be written: No such file or directory"},
               {in(std::string(256, 'n')), ": cannot be written: File name too long"}};
  for (const auto& c : cases) {
    EXPECT_ERROR(check_output(c.path, {}), c.message);
    EXPECT_ERROR(write_file_durably(c.path, "text"), c.message);
  }
  write_file_durably(in(std::string(255, 'n')), "a name as long as there are");
  EXPECT_EQ(names_in(folder).size(), before.size() + 1);
  EXPECT_EQ(read_file(in("file")), "text");
}

TEST_F(Output, ThatIsAnInputIsRefused) {
  write("input", "text");
  fs::create_symlink("input", in("link"));
  fs::create_directory(in("sub"));
  for (const std::string& path : {in("input"), in("link"), in("sub/../input")})
    EXPECT_ERROR(check_output(path, {in("x"), in("input")}), "reads or writes it as " + in("input") + ", too");
  EXPECT_ERROR(check_output(in("input"), {in("link")}), "reads or writes it as");
  EXPECT_ERROR(check_output(in("sub/../new"), {in("new")}), "reads or writes it as");  // the same output twice
  EXPECT_EQ(error_of([&] {
              check_output(in("other"), {in("input"), in("nowhere/x")});
              check_output("/dev/null", {"/dev/null"});
            }),
            "");
}

TEST_F(Output, FoldersGetTheirNameWhenTheyAreComplete) {
  {
    NewFolder first(in("model")), second(in("model")), given_up(in("another"));
    write_file_durably(first.unfinished() + "/file", "first");
    write_file_durably(given_up.unfinished() + "/file", "given up");
    first.finish();
    write_file_durably(second.unfinished() + "/file", "second");
    EXPECT_ERROR(second.finish(), "model: cannot be put in place");
  }
  EXPECT_EQ(names_in(folder), std::set<std::string>{"model"});
  EXPECT_EQ(read_file(in("model/file")), "first");
  EXPECT_ERROR(NewFolder(in("model")), "exists already");
  fs::create_symlink("nowhere", in("dangling"));
  EXPECT_ERROR(NewFolder(in("dangling")), "exists already");
}

TEST_F(Output, WhatIsThereIsFoundOrAnError) {
  write("file", "");
  fs::create_symlink("loop", in("loop"));
  EXPECT_TRUE(path_exists(in("file")) && !is_folder(in("file")) && is_folder(folder));
  EXPECT_FALSE(path_exists(in("nowhere")) || is_folder(in("nowhere")) || path_exists(in("file/x")));
  EXPECT_ERROR(path_exists(in("loop")), "loop: cannot be read: Too many levels of symbolic links");
  fs::create_symlink("nowhere", in("dangling"));
  EXPECT_ERROR(path_exists(in("dangling")), "dangling: is a link that leads nowhere");
  EXPECT_ERROR(is_folder(std::string(300, 'n')), ": cannot be read: File name too long");
}

// ----------------------------------------------------------------------------
// Names and JSON

// What name_as_text has made of a name.
static std::string name_of_text(const std::string& text) {
  std::string name;
  for (size_t at = 0; at < text.size(); at++) {
    if (text[at] != '\\') name += text[at];
    else if (text[++at] == 'x') name += char(std::stoi(text.substr(at + 1, 2), nullptr, 16)), at += 2;
    else name += text[at];
  }
  return name;
}

TEST(NameAsText, IsUtf8AndComesBack) {
  EXPECT_EQ(name_as_text("na\xC3\xAFve.txt"), "na\xC3\xAFve.txt");
  EXPECT_EQ(name_as_text("a\xFF\\b"), "a\\xFF\\\\b");
  EXPECT_EQ(name_as_text("\\xFF"), "\\\\xFF");
  for (int a = 1; a < 256; a++)
    for (int b = 1; b < 256; b++) {
      const std::string name = {'n', char(a), char(b), '\xC3'};
      const std::string text = name_as_text(name);
      ASSERT_EQ(name_of_text(text), name);
      ASSERT_NO_THROW(nlohmann::json(text).dump()) << text;
    }
}

TEST(Json, NestedTooDeepIsNone) {
  auto nested = [](size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_FALSE(parse_json(nested(100)).is_discarded());
  EXPECT_TRUE(parse_json(nested(101)).is_discarded());
  EXPECT_TRUE(parse_json(nested(300000)).is_discarded());
  EXPECT_FALSE(parse_json("[\"" + std::string(200, '[') + "\\\"" + std::string(200, '{') + "\"]").is_discarded());
  EXPECT_TRUE(parse_json("[\"a\", " + nested(100) + "]").is_discarded()) << "a string has an end";
  std::string wide = "[";
  for (int i = 0; i < 200; i++) wide += "{},[],";
  EXPECT_FALSE(parse_json(wide + "0]").is_discarded()) << "side by side";
  EXPECT_TRUE(parse_json("{").is_discarded());
  EXPECT_ERROR(parse_json_or_throw(nested(101)), "nested more than 100 deep");
}

TEST(Json, WholeNumbersAreWholeAndInRange) {
  using nlohmann::json;
  EXPECT_EQ(whole_number(json::parse("7"), "n", 0, 10), 7);
  EXPECT_EQ(whole_number(json::parse("-3"), "n", -3, 10), -3);
  for (const char* text : {"1.5", "1e30", "2.0", "\"1\"", "null", "true", "[1]"})
    EXPECT_ERROR(whole_number(json::parse(text), "n", 0, 10), "n: is not a whole number");
  for (const char* text :
       {"11", "-1", "4294967297", "9223372036854775808", "18446744073709551615", "-9223372036854775808"})
    EXPECT_ERROR(whole_number(json::parse(text), "n", 0, 10), "n: must lie between 0 and 10");
}
