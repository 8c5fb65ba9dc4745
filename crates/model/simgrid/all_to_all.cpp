// SimGrid version of the all-to-all in crates/model/src/flow.rs: HOSTS hosts on a non-blocking switch, MESSAGES
// messages of BYTES bytes per pair of hosts. All messages start at once (concurrent), or each host sends one message
// at a time, to the next host first (sequential). Prints 0, the simulated time of the last arrival, and peak memory in KiB.
//
//   g++ -O2 all_to_all.cpp -lsimgrid -o all_to_all && ./all_to_all 128 64 1000000 12.5e9 1e-6 sequential
#include <cstdio>
#include <cstdlib>
#include <string>
#include <sys/resource.h>
#include <vector>

#include <simgrid/s4u.hpp>

namespace sg4 = simgrid::s4u;

int main(int argc, char** argv)
{
  sg4::Engine engine(&argc, argv);
  if (argc != 7) {
    std::fprintf(stderr, "usage: all_to_all HOSTS MESSAGES BYTES RATE LATENCY concurrent|sequential\n");
    return 2;
  }
  const int hosts = std::atoi(argv[1]), messages = std::atoi(argv[2]);
  const bool sequential = std::string(argv[6]) == "sequential";
  const double bytes = std::atof(argv[3]), rate = std::atof(argv[4]), latency = std::atof(argv[5]);
  // Max-min sharing as in the model: no correction for TCP windows or headers.
  sg4::Engine::set_config("network/model:CM02");
  sg4::Engine::set_config("network/TCP-gamma:0");
  sg4::Engine::set_config("network/crosstraffic:0");
  sg4::Engine::set_config("network/optim:Lazy");

  auto* zone = sg4::create_full_zone("zone");
  std::vector<sg4::Host*> all;
  std::vector<const sg4::Link*> up, down;
  for (int i = 0; i < hosts; i++) {
    const std::string name = std::to_string(i);
    all.push_back(zone->create_host("host" + name, 1e9));
    up.push_back(zone->create_link("up" + name, rate)->set_latency(latency / 2)->seal());
    down.push_back(zone->create_link("down" + name, rate)->set_latency(latency / 2)->seal());
  }
  for (int i = 0; i < hosts; i++)
    for (int k = 0; k < hosts; k++)
      if (i != k)
        zone->add_route(all[i]->get_netpoint(), all[k]->get_netpoint(), nullptr, nullptr,
                        {sg4::LinkInRoute(up[i]), sg4::LinkInRoute(down[k])}, false);
  zone->seal();

  if (sequential)
    for (int i = 0; i < hosts; i++)
      sg4::Actor::create("sender", all[i], [&, i] {
        for (int k = 1; k < hosts; k++)
          for (int m = 0; m < messages; m++)
            sg4::Comm::sendto(all[i], all[(i + k) % hosts], static_cast<uint64_t>(bytes));
      });
  else
    sg4::Actor::create("all", all[0], [&] {
      std::vector<sg4::CommPtr> comms;
      comms.reserve(static_cast<size_t>(hosts) * (hosts - 1) * messages);
      for (int i = 0; i < hosts; i++)
        for (int k = 0; k < hosts; k++)
          for (int m = 0; m < messages && i != k; m++)
            comms.push_back(sg4::Comm::sendto_async(all[i], all[k], static_cast<uint64_t>(bytes)));
      for (auto& comm : comms)
        comm->wait();
    });
  engine.run();
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  std::printf("0 %.9f %ld\n", sg4::Engine::get_clock(), used.ru_maxrss);
  return 0;
}
