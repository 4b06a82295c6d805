// The classes of xseg.hpp for memory of other processes, on host memory, with both sides in one process.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <utility>
#include <xseg.hpp>

#include "check.h"

int main() {
  int sockets[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  xseg::Heap here("backend:host,limit:64MiB"), there("backend:host");
  xseg::Block block = here.alloc(5 << 20);
  auto* mine = static_cast<unsigned char*>(block.get());
  mine[4 << 20] = 42;
  here.send(block, sockets[0]);
  xseg::Import first = there.receive(sockets[1]);
  CHECK(first && first.size() == 5 << 20 && static_cast<unsigned char*>(first.get())[4 << 20] == 42);
  here.send(block, sockets[0]);
  {
    xseg::Import second = there.receive(sockets[1]);
    CHECK(second.get() != first.get() && there.stats().imported == 10 << 20);
    xseg::Import moved = std::move(second);
    CHECK(moved && !second);
    first = std::move(moved);
  }
  CHECK(first && there.stats().imported == 5 << 20);
  block.reset();
  CHECK(here.stats().exported == 5 << 20 && static_cast<unsigned char*>(first.get())[4 << 20] == 42);
  first.close();
  first.close();
  here.tick();
  CHECK(!first && here.stats().exported == 0 && there.stats().imported == 0);
  close(sockets[0]);
  try {
    there.receive(sockets[1]);
    CHECK(!"something came");
  } catch (const xseg::Error& error) {
    CHECK(error.status() == XSEG_SHARE && std::strstr(error.what(), "the other process ended") != nullptr);
  }
  return wrong;
}
