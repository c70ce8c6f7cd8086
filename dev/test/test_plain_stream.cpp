// data/plain_stream.cpp, which stands for data/archive_stream.cpp where libarchive is not installed.
//
// COVERS ONLY data/plain_stream.cpp
#include "data/plain_stream.cpp"
#include "dev/test/files.h"
#include "dev/test/helpers.h"

class PlainStream : public FolderTest {
 protected:
  SourceFile source(const std::string& name, const std::string& bytes) const { return {write(name, bytes)}; }
};

TEST_F(PlainStream, GivesEachFilesBytesAndChecksum) {
  const std::string large(100000, 'x'), texts[] = {"first", "", large + "end", "last" + large};
  std::vector<SourceFile> sources;
  for (const std::string& text : texts) sources.push_back(source("f" + std::to_string(sources.size()), text));
  ArchiveStream stream(sources, 0);
  for (int i = 0; i < 4; i++) {
    ASSERT_TRUE(stream.next_file());
    EXPECT_EQ(stream.source(), i);
    EXPECT_EQ(stream.name(), sources[i].path);
    std::string bytes(texts[i].size() + 10, 0);
    if (i == 3) bytes.resize(2);  // the rest counts for the checksum, too
    bytes.resize(stream.read(bytes.data(), bytes.size()));
    EXPECT_EQ(bytes, texts[i].substr(0, i == 3 ? 2 : std::string::npos));
  }
  EXPECT_FALSE(stream.next_file());
  EXPECT_EQ(stream.bytes_read(), 5 + 100003 + 100004);
  for (int i = 0; i < 4; i++) EXPECT_EQ(sources[i].checksum, crc32c(texts[i].data(), texts[i].size())) << i;
}

TEST_F(PlainStream, BeginsWithTheFileThatItIsTold) {
  std::vector<SourceFile> sources = {source("a", "1"), source("b", "2")};
  ArchiveStream stream(sources, 1);
  ASSERT_TRUE(stream.next_file());
  EXPECT_EQ(stream.name(), sources[1].path);
}

TEST_F(PlainStream, RefusesWhatIsPacked) {
  const std::string tar = std::string(257, 0) + "ustar" + std::string(300, 0);
  for (const std::string& bytes : {std::string("\x1f\x8b\x08 gzip"), std::string("BZh9 bzip2"),
                                   std::string("\xfd\x37zXZ xz"), std::string("\x28\xb5\x2f\xfd zstd"), tar}) {
    std::vector<SourceFile> sources = {source("packed", bytes)};
    EXPECT_ERROR(ArchiveStream(sources, 0).next_file(), sources[0].path + ": is compressed or a tar file, and this");
  }
  std::vector<SourceFile> missing = {{in("missing")}};
  EXPECT_ERROR(ArchiveStream(missing, 0).next_file(), "missing: cannot open: No such file");
}
