// A browser without a window, in which tests open pages.
#pragma once
#include <cstdint>
#include <string>
#include "command_line.h"

// What a page is after its scripts have run.
struct OpenedPage {
  std::string dom;      // its elements as text
  std::string console;  // what scripts wrote to the console, errors among it
};

class BrowserTest : public CommandLine {
 protected:
  // Skips the test where there is no Chromium that starts: on Ubuntu its package is an empty one that asks for a snap.
  void SetUp() override {
    CommandLine::SetUp();
    for (const char* name : {"chromium", "chromium-browser", "google-chrome"})
      if (browser.empty() && run(std::string(name) + " --version").out.find("Chrom") != std::string::npos)
        browser = name;
    if (browser.empty()) GTEST_SKIP() << "no Chromium that starts (Debian: chromium)";
  }
  // Opens a file and waits for its scripts.
  OpenedPage open(const std::string& path) const {
    const Outcome o =
        run(chromium("--virtual-time-budget=5000 --dump-dom") + " 'file://" + fs::absolute(path).string() + "'");
    EXPECT_EQ(o.exit_status, 0) << o.err;
    OpenedPage page = {o.out, ""};
    std::istringstream lines(o.err);
    for (std::string line; std::getline(lines, line);)
      if (line.find("CONSOLE") != std::string::npos) page.console += line + "\n";
    return page;
  }
  // The value of an attribute of the page's <html>; "" without one.
  static std::string attribute(const OpenedPage& page, const std::string& name) {
    const std::string html = page.dom.substr(0, page.dom.find('>', page.dom.find("<html")));
    const size_t at = html.find(" " + name + "=\"");
    return at == std::string::npos
               ? ""
               : html.substr(at + name.size() + 3, html.find('"', at + name.size() + 3) - at - name.size() - 3);
  }
  // How many pixels of a screenshot have each of these colours ("#rrggbb"), with the page in light or dark colours. The
  // browser itself reads the picture back, from a page that contains it.
  std::vector<int> pixels(const std::string& path, bool dark, const std::vector<std::string>& colours) const {
    const std::string picture = in("screenshot.png");
    const Outcome o = run(chromium(format("--blink-settings=preferredColorScheme=%d --window-size=1200,1600 "
                                          "--virtual-time-budget=5000 "
                                          "--screenshot='%s'",
                                          dark ? 0 : 1, picture.c_str())) +
                          " 'file://" + fs::absolute(path).string() + "'");
    EXPECT_EQ(o.exit_status, 0) << o.err;
    const OpenedPage counted = open(write("count.html", "<html><img id=i src='data:image/png;base64," +
                                                            base64(read_file(picture)) + R"('><script>
      const i = document.getElementById('i'), c = document.createElement('canvas');
      addEventListener('load', () => {
        c.width = i.width; c.height = i.height;
        const g = c.getContext('2d'), counts = {};
        g.drawImage(i, 0, 0);
        const p = g.getImageData(0, 0, c.width, c.height).data;
        for (let k = 0; k < p.length; k += 4) {
          const name = '#' + [p[k], p[k + 1], p[k + 2]].map(x => x.toString(16).padStart(2, '0')).join('');
          counts[name] = (counts[name] || 0) + 1;
        }
        document.documentElement.dataset.counts = )" + json(colours).dump() +
                                                            R"(.map(x => counts[x] || 0).join(' ');
      });</script></html>)"));
    std::istringstream numbers(attribute(counted, "data-counts"));
    std::vector<int> found;
    for (int n; numbers >> n;) found.push_back(n);
    EXPECT_EQ(found.size(), colours.size()) << counted.console;
    return found;
  }

 private:
  std::string browser;

  // A profile of its own, and what containers need: no sandbox, no shared memory in /dev/shm.
  std::string chromium(const std::string& options) const {
    return "timeout 60 " + browser +
           " --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --enable-logging=stderr "
           "--user-data-dir='" +
           in("profile") + "' " + options;
  }
  static std::string base64(const std::string& bytes) {
    const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string text;
    for (size_t i = 0; i < bytes.size(); i += 3) {
      uint32_t word = 0;
      for (size_t k = 0; k < 3; k++) word = word << 8 | (i + k < bytes.size() ? uint8_t(bytes[i + k]) : 0);
      for (size_t k = 0; k < 4; k++) text += i + k <= bytes.size() ? digits[word >> (18 - 6 * k) & 63] : '=';
    }
    return text;
  }
};
