import re,os,glob
R='/tmp/h/model/'
M=R+'crates/model/'
S=R+'crates/site/'
def files(*pats):
    out=[]
    for p in pats: out+=glob.glob(p,recursive=True)
    return sorted(set(out))
model=files(M+'src/**/*.rs',M+'tests/*.rs')
cli=[R+'crates/cli/src/model.rs',R+'crates/cli/src/model/event_builder.rs',R+'crates/cli/src/bench/model.rs',R+'crates/cli/src/args.rs']
def sub(fs,rules,comments=False):
    for f in fs:
        if not os.path.exists(f): print('missing',f); continue
        t=open(f).read().split('\n')
        o=[]
        for l in t:
            if not comments and l.lstrip().startswith('//'):
                o.append(l); continue
            for a,b in rules: l=re.sub(a,b,l)
            o.append(l)
        n='\n'.join(o)
        if n!='\n'.join(t): open(f,'w').write(n)
m=lambda *n:[M+'src/'+x for x in n]
eb=files(M+'src/benchmarks/event_builder/*.rs')
noteb=[f for f in model if f not in eb and not f.endswith('tests/event_builder.rs')]
uses=noteb+eb+[M+'tests/event_builder.rs']+cli

# --- private names in single files first
sub(m('benchmarks/hbm.rs'),[(r'\bChannel\b','PseudoChannel'),(r'\bHbm\b','HbmTiming'),(r'\bPattern\b','AccessPattern'),(r'\bturnaround\b','switch_round_trip'),(r'\bMaster\b','AxiMaster'),(r'\bREGION\b','PSEUDO_CHANNEL_SPAN')])
sub(m('path/resolve.rs','rows/mod.rs'),[(r'\bHbm\b','HbmTiming'),(r'\bPattern\b','AccessPattern'),(r'\bturnaround:',"switch_round_trip:")])
sub([M+'tests/analytic.rs'],[(r'\bPattern\b','AccessPattern')])
sub(m('component/adapter.rs'),[(r'\bTable\b','Tlb'),(r'look_up','lookup'),
  (r'\bWay \{ there: vec!\[nic\.up\], back: vec!\[nic\.down\] \}','PciePath { to_memory: vec![nic.upstream], from_memory: vec![nic.downstream] }'),
  (r'\bWay\b','PciePath'),(r'\bway\(','pcie_path('),(r'\bway\.there\b','pcie.to_memory'),(r'\bway\.back\b','pcie.from_memory'),(r'let way =','let pcie ='),
  (r'\bthere:','to_memory:'),(r'\bback:','from_memory:'),(r', back \}',', from_memory: back }'),(r'\{ there, back','{ to_memory: there, from_memory: back'),
  (r'\blegs\(','network_channels('),(r'\bForming\b','TxPacket'),(r'\bforming\b','tx_pending'),
  (r'\bself\.asking\b','self.fetch_queue'),(r'\basking\b','fetch_queue'),(r'\basked\b','fetch_bytes'),(r'\bask\(','fetch_payload('),
  (r'\bgathering\b','gather_queue'),(r'\blanding\b','rx_writing'),(r'\blanded\(','payload_placed('),(r'\bput_out\(','transmit_ready('),(r'\bform\(','segment('),
  (r'\basks_again\b','fetch_timer_set'),(r'\bGATHER\b','GATHER_TIMER'),(r'\bASK\b','FETCH_TIMER'),(r'\bAHEAD\b','TX_BACKLOG'),(r'\bIN_PLACE\b','PLACED'),(r'\bin_place\b','placed'),
  (r'\bmissing\b','unfetched'),(r'\btranslating\b','tlb'),(r'\btranslated\b','awaiting_tlb'),(r'\barrive\(','packet_arrived('),(r'\bwrite\(','write_payload('),
  (r'\breading\b','read_route'),(r'\bwriting\b','write_route'),(r'\bcompletions\b','completion_route'),(r'self\.reads\b','self.active_reads'),(r'\breads: 0','active_reads: 0'),(r'^    reads: u32','    active_reads: u32'),(r'\breads_waiting\b','waiting_reads'),
  (r'\bpayload: u32','max_payload: u32'),(r'self\.payload\b','self.max_payload'),(r'\bpayload: side','max_payload: side'),(r'\brequest: u32','max_read_request: u32'),(r'self\.request\)','self.max_read_request)'),(r'\brequest: side','max_read_request: side'),
  (r'\(hit, miss\)','(hit, miss)'),
])
sub(m('component/tlb.rs'),[(r'\bTable\b','Tlb'),(r'look_up','lookup'),(r'\bpage\b(?=[:,;)])','page'),])
sub(m('component/completer.rs'),[(r'\bMemory\b','Completer')])
for f in ['component/adapter.rs','benchmarks/dma.rs','benchmarks/event_builder/packet_level.rs']:
    sub(m(f),[(r'\bMemory\b','Completer')])
sub(m('component/pcie.rs'),[(r'\bLanes\b','LinkChannels'),(r'\bup:','upstream:'),(r'\bdown:','downstream:'),(r'pub fn link\(','pub fn add_link(')])
sub(m('component/adapter.rs','benchmarks/dma.rs'),[(r'pcie::link\(','pcie::add_link('),(r'\b(nic|far|lanes)\.up\b',r'\1.upstream'),(r'\b(nic|far|lanes)\.down\b',r'\1.downstream')])
for f in ['component/pcie.rs','component/completer.rs','component/adapter.rs','benchmarks/dma.rs','benchmarks/event_builder/packet_level.rs']:
    sub(m(f),[(r'\bWRITE\b','MEMORY_WRITE'),(r'\bREAD\b','MEMORY_READ')])

# --- dma, osu
sub(m('benchmarks/dma.rs','benchmarks/apenet.rs','rows/mod.rs','measure.rs')+[M+'tests/analytic.rs'],[(r'(?<!osu::)\bTest\b','DmaTest'),(r'\bInitiator\b','DmaEngine'),(r'(?<![:\w])Host(?=[ ,};:)>{])(?!Id)','DmaHost'),(r'\binitiator\b','engine')])
sub(m('benchmarks/dma.rs'),[(r'\bpieces\(','split('),(r'\bbegun\b','measure_start'),(r'\bended\b','measure_end'),(r'\bbytes_at_begin\b','bytes_at_start'),(r'let engine = \|','let stage = |'),(r'\bengine\("','stage("')])
sub(m('benchmarks/osu.rs'),[(r'\bTest\b','OsuTest'),(r'\beager:','eager_limit:'),(r'mpi\.eager\b','mpi.eager_limit'),(r'\bcopy:','copy_rate:'),(r'mpi\.copy\b','mpi.copy_rate'),(r'\bNOTE\b','RENDEZVOUS_HEADER'),(r'\bREQUEST\b','RTS'),(r'\bGO_AHEAD\b','CTS'),(r'\bACKNOWLEDGE\b','REPLY'),(r'\bANSWER\b','REPLY_SIZE'),(r'\bHEARD\b','FROM_ADAPTER'),(r'\bSKIP\b','WARMUP_ROUNDS'),(r'\bcopied\b','copied_bytes')])
sub(m('measure.rs'),[(r'osu::Test','osu::OsuTest')])
sub([M+'tests/benchmarks.rs'],[(r'mpi\.eager\b','mpi.eager_limit')])

# --- engine
sub(m('flow.rs'),[(r'\bWayId\b','FlowPathId'),(r'\bWay\b','FlowPath'),(r'\bway:','path:'),(r'\bway\b','path'),(r'\bways\b','paths'),(r'\bFluid\b','FlowSimulation'),(r'\bshares\b','rate_updates'),(r'\bshare\(\)','fair_share()'),(r'fn share\(','fn fair_share('),(r'\bsettle\(','update_rates('),(r'\bplaces\b','positions'),(r'\bfluid\b','flows'),(r'all_to_all_in_turns','all_to_all_sequential'),(r'flows\.link\(','flows.add_link('),(r'flows\.path\(','flows.add_path('),(r'pub fn link\(','pub fn add_link('),(r'pub fn path\(','pub fn add_path('),(r'flows\.start\(','flows.start_flow('),(r'pub fn start\(','pub fn start_flow('),(r'pub fn next_end\(','pub fn next_completion('),(r'flows\.next_end\(','flows.next_completion('),(r'\bopen\b','unfixed_flows'),(r'\bcarried\b','sent'),(r'\bchanged\b','dirty_paths')])
sub([M+'tests/analytic.rs']+m('benchmarks/event_builder/flow_level.rs'),[(r'\bFluid\b','FlowSimulation'),(r'fluid\.link\(','fluid.add_link('),(r'fluid\.way\(','fluid.add_path('),(r'fluid\.start\(','fluid.start_flow('),(r'fluid\.next_end\(','fluid.next_completion('),(r'\bfluid\b','flow_simulation')])
sub([R+'crates/cli/src/bench/model.rs'],[(r'all_to_all_in_turns','all_to_all_sequential'),(r'\bQueue\b','EventQueue'),(r'\bBinary\b','BinaryHeapQueue'),(r'\bQuaternary\b','FourAryHeapQueue'),(r'\brelay\b','packet_rings'),(r'model::speed','model::engine_bench'),(r'model::tool::','model::benchmarks::'),(r'model/peer/','model/simgrid/'),(r'(calibrate, figures, flow), table','\\1, rows'),(r'table::calibration','rows::calibration'),(r'figures::torus','figures::torus')])
sub(m('engine_bench.rs'),[(r'\bPending\b','FutureEventSet'),(r'\bBinary\b','BinaryHeapQueue'),(r'\bQuaternary\b','FourAryHeapQueue'),(r'\brelay\(','packet_rings('),(r'\bStart\b','Injector'),(r'\bRelay\b','Forwarder'),(r'\bleast\b','earliest')])
sub(model,[(r'\bLine\b','Channel'),(r'\bLineId\b','ChannelId'),(r'\bLineReport\b','ChannelReport'),(r'\bLineState\b','ChannelState'),
  (r'\bsimulation\.line\b','simulation.add_channel'),(r'\bsimulation\.line::','simulation.add_channel::'),(r'\bsimulation\.endpoint\(','simulation.add_endpoint('),(r'\.reserve\(\)','.reserve_endpoint()'),(r'guarded_route','bubble_route'),(r'\banswered_by\b','with_reply'),(r'\bof_reply\b','reply_to'),
  (r'\bwake_after\b','set_timer'),(r'simulation\.wake\(','simulation.set_timer('),(r'fn wake\(&mut self, (_?token)','fn timer(&mut self, \\1'),(r'context\.release\(','context.return_credits('),
  (r'\bline_report','channel_report'),(r'Channel::step\(','Channel::stage('),(r'Channel::steps\(','Channel::stage_by_kind('),
  (r'\bQueue\b','EventQueue'),(r'\.unit\(\)','.uniform()'),(r'\.bits\(\)','.next_u64()'),(r'has_more_now','has_event_now')])
sub(m('engine/random.rs'),[(r'fn unit\(','fn uniform('),(r'fn bits\(','fn next_u64(')])
sub(m('engine/channel.rs'),[(r'pub fn step\(','pub fn stage('),(r'pub fn steps\(','pub fn stage_by_kind('),(r'\bline: Channel\b','channel: Channel'),(r'\bself\.line\b','self.channel'),(r'\bline\.time\(','channel.time('),(r'^            line,$','            channel,'),(r'\bspan\b(?=: Picos,)','elapsed'),(r'\bspan: now','elapsed: now'),(r'fn wait\(','fn block('),(r'fn resume\(','fn unblock('),(r'is_waiting\(','is_blocked('),(r'Waiting','Blocked'),(r'fn begin\(','fn start('),(r'\bcached\b','last_time')])
sub(m('engine/mod.rs'),[(r'^mod line;','mod channel;'),(r'^mod queue;','mod event_queue;'),(r'pub use line::','pub use channel::'),(r'pub use queue::','pub use event_queue::'),(r'^use line::','use channel::'),
  (r'pub fn line<','pub fn add_channel<'),(r'\bline: Channel\b','channel: Channel'),(r'pub fn endpoint\(','pub fn add_endpoint('),(r'pub fn reserve\(','pub fn reserve_endpoint('),
  (r'\blines\b','channels'),(r'\bline\b','channel'),(r'Hop::Line\b','Hop::Channel'),(r'^    Channel \{ channel: u32, reserve: u32 \}','    Channel { channel: u32, bubble: u32 }'),(r'\breserve\b','bubble'),
  (r'Wake\(','Timer('),(r'Event::Wake','Event::Timer'),(r'pub fn wake\(','pub fn set_timer('),(r'code\.wake\(','code.timer('),(r'fn release\(','fn return_credits('),(r'core\.release\(','core.return_credits('),(r'self\.release\(','self.return_credits('),
  (r'\.wait\(self','.block(self'),(r'\.resume\(','.unblock('),(r'is_waiting\(','is_blocked('),(r'state\.begin\(','state.start('),(r'\broom\b','buffer_state'),(r'to_line\b','to_channel'),(r'mod channels','mod channels')])
sub(m('engine/event_queue.rs'),[(r'\bplace\(','insert('),(r'\btaken\b','popped')])

# --- module paths
sub(uses,[(r'crate::tool::verbs::','crate::path::'),(r'tool::verbs::','path::'),(r'super::verbs::','crate::path::'),(r'super::nic::','crate::component::adapter::'),
  (r'tool::mic\b','benchmarks::extoll'),(r'\btool::\{apenet, mic\}','benchmarks::{apenet, extoll}'),(r'\btool::','benchmarks::'),(r'crate::setup::','crate::path::'),(r'millstream_model::setup::','millstream_model::path::'),
  (r'part::memory','component::completer'),(r'part::translation','component::tlb'),(r'part::pcie','component::pcie'),(r'crate::part\b','crate::component'),(r'\bsheet::','result_table::'),(r'(crate|millstream_model)::whatif','\\1::sweep'),(r'\bwhatif::','sweep::'),(r'Parameters, table, whatif','Parameters, rows, sweep'),
  (r'crate::calibrate::spread\b','crate::parallel::parallel_map'),(r'\bspread\(','parallel_map('),(r'\bspread_by_family\b','rms_by_category'),(r'crate::table::','crate::rows::csv::'),(r'table::(load|calibration|questions|parse)\b','rows::\\1'),
  (r'mic::(bandwidth|exchange_gain)','extoll::\\1')])

# --- paths
pf=[f for f in noteb if f not in m('flow.rs','figures.rs','parameters.rs')]+m('figures.rs')
sub(pf,[(r'\bverbs::Setup\b','DataPath'),(r'event_builder::Setup\b','event_builder::Scenario'),(r'\bSetupError\b','PathError'),(r'\bSetup\(#\[from\]','Path(#[from]'),(r'::Setup\b','::Path')])
sub(m('path/mod.rs','path/resolve.rs','component/adapter.rs'),[(r'(?<!::)\bCard\b(?!\()','PeerCard'),(r'\bTarget\b','TargetMemory'),(r'\bVia\b','PeerRoute'),(r'\bvia\b','route'),(r'\bLeg\b','NetworkHop'),(r'\blegs?\b','hops'),(r'\bTranslation\b','AddressTranslation')])
sub(m('path/resolve.rs'),[(r'\bMake\b','AdapterFamily'),(r'\bmake\(','adapter_family('),(r'(?<!\.)\bfamily\(','processor_family('),(r'\bPlace\b','MemoryLocation'),(r'\bplace\(site','locate(site'),(r'fn place\(','fn locate('),(r"\bHop\b",'HostLink'),(r'\bhop\(site','host_link(site'),(r'fn hop\(','fn host_link('),(r'\bRing\b','TorusPath'),(r'\bring\(site','torus_path(site'),(r'fn ring\(','fn torus_path('),(r'\banswers\(','peer_read_rate('),(r'\bfill_up\(','split_residual_latency('),(r'\bover_torus\(','data_path_over_torus('),(r'\bfurther\(','later_hops('),(r'\bring\b','torus_path'),(r'host_memory\(','host_completer('),(r'\bways\b','torus')])
sub([M+'tests/analytic.rs'],[(r'host_memory\(','host_completer(')])
sub(noteb,[(r'\bhost_memory\b','host_completer')])
sub([f for f in noteb],[(r'\bTiming\b','CompleterTiming'),(r'\bsides\b','ends'),(r'\bside\(','path_end('),(r'(?<!["\w ])\bside\b(?=[.:,)])','end'),(r'\bSide\b','PathEnd'),(r'\bfurther\b','later_hops'),(r'\bOVERHEAD\b(?<!_OVERHEAD)','IB_OVERHEAD'),(r'\bHEADERS\b','IB_HEADERS')])
for f in noteb:
    t=open(f).read().split('\n'); o=[]
    for l in t:
        if l.lstrip().startswith('//'): o.append(l); continue
        if re.match(r'\s*(pub )?use ',l): l=re.sub(r'\bsetup\b','data_path',l)
        l=re.sub(r'\bsetup\(','data_path(',l)
        l=re.sub(r'\bSetup\b','DataPath',l)
        l=re.sub(r'(?<!::)\bsetup\b','path',l)
        l=re.sub(r'(?<!ib::)(?<!\w)\bBandwidth\b(?=[ ;,{}])(?!\()','BandwidthResult',l) if ('path' in f or 'perftest' in f or 'osu' in f) else l
        o.append(l)
    open(f,'w').write('\n'.join(o))
sub(m('benchmarks/osu.rs'),[(r'OsuTest::BandwidthResult','OsuTest::Bandwidth'),(r'^    BandwidthResult,','    Bandwidth,')])
sub(eb,[(r'crate::path::\{SetupError, setup\}','crate::path::{PathError, data_path}'),(r'\bSetupError\b','PathError'),(r'\bSetup\(#\[from\]','Path(#[from]'),(r'verbs::Setup','DataPath'),(r'use crate::path::\{self, Adapter, HEADERS\};','use crate::path::{Adapter, DataPath, IB_HEADERS};'),(r'\bHEADERS\b','IB_HEADERS'),(r'\bsetup\(site','data_path(site'),(r'\bSetup\b','Scenario'),(r'\bsetup\b','scenario'),(r'\bTiming\b','CompleterTiming'),
   (r'\bSlow\b','SlowBuilder'),(r'\bslow: Vec','slow_builders: Vec'),(r'scenario\.slow\b','scenario.slow_builders'),(r'self\.slow\b','self.slow_builders'),(r'\bslow: Vec::new','slow_builders: Vec::new'),(r'\bShown\b','RunSummary'),(r'\bLevel\b','ModelLevel'),(r'\bBuilderLoad\b','BuilderStats'),(r'\bOutcome\b','RunResult'),(r'\bLoad\b','ReadoutLoad'),
   (r'\bmod show;','mod summary;'),(r'show::','summary::'),(r'\bmod flows;','mod flow_level;'),(r'\bmod packets;','mod packet_level;'),(r'\bflows::run','flow_level::run'),(r'\bpackets::run','packet_level::run'),
   (r'\bCarrier\b','NetworkModel'),(r'\bcarrier\b','network'),(r'\bPlace\b','ControlEndpoint'),(r'(?<!code\.)\bWake\b','TimerEvent'),(r'TimerEvent::Wake','TimerEvent'),(r'\bSaid\b','ManagerInput'),(r'\bPack\b','ControlBatch'),(r'\bpacks\b','control_batches'),(r'free_packs','free_control_batches'),(r'\bpack\b','control_batch'),(r'\bContent\b','SlotState'),(r'\bcontents\b','slot_states'),(r'\bcontent\b','slot_state'),(r'\bStation\b','BuilderState'),(r'\bheard\b','control_received'),(r'\bwoken\b','timer_expired'),(r'\btell_manager\b','send_to_manager'),(r'\bcall_manager\b','wake_manager'),(r'\bflaw\b','injected_fault'),(r'\bmost_held\b','max_buffered_batches'),(r'\bdelay_most\b','latency_max'),(r'\bdelay_sum\b','latency_sum'),(r'\bdelay\b(?=[,:. ;\[])','build_latency'),(r'\btravelled\b','network_payload'),(r'\bbusiest\b','peak_link_utilization'),(r'\bmost_slots\b','max_slots_used'),(r'\bsaid\b','inputs'),
   (r'network\.wake\(','network.set_timer('),(r'fn wake\(&mut self, after: Picos, what: TimerEvent\)','fn set_timer(&mut self, after: Picos, event: TimerEvent)'),(r'\bwhat\.token\(\)','event.token()'),(r'\bof_token\b','from_token'),(r'\bof_tag\b','from_tag'),(r'Scenario::of\b','Scenario::from_site'),(r'pub fn of\(site','pub fn from_site(site'),
   (r'\bsends\(\)','tx_payload_rate()'),(r'fn sends\(','fn tx_payload_rate('),(r'\btakes\(\)','rx_payload_rate()'),(r'fn takes\(','fn rx_payload_rate('),(r'fn before\(','fn post_latency('),(r'\.before\(\)','.post_latency()'),(r'fn after\(','fn delivery_latency('),(r'\.after\(\)','.delivery_latency()'),(r'fn acknowledged\(','fn ack_latency('),(r'\.acknowledged\(\)','.ack_latency()'),(r'fn control\(&self','fn control_latency(&self'),(r'\.control\(\)','.control_latency()'),(r'fn buffer\(','fn rx_buffer('),(r'node\.buffer\(\)','node.rx_buffer()')])
sub(m('benchmarks/event_builder/units.rs','benchmarks/event_builder/flow_level.rs'),[(r'\bcarried: u64','network_bytes: u64'),(r'self\.carried\b','self.network_bytes'),(r'station\.carried','station.network_bytes'),(r'\)\]\.carried',')].network_bytes'),(r'\bstations\b','builder_states'),(r'\bstation\b','state'),(r'\btakes\b','rx_rate'),(r'\bsends\b','tx_rate'),(r'\bcarried: 0,','network_bytes: 0,'),(r'carried: self\.network_bytes','network_bytes: self.network_bytes'),(r'load: BuilderStats','stats: BuilderStats'),(r'state\.load\b','state.stats'),(r'\bis_in_turn\b','manager_busy'),(r'manager_turn','run_manager_turn'),(r'await_batch','schedule_next_batch'),(r'await_deadline','schedule_deadline'),(r'control_batch\(&mut self','store_control_batch(&mut self'),(r'self\.control_batch\(ControlBatch','self.store_control_batch(ControlBatch'),(r'fn step\(&self','fn control_send_time(&self'),(r'self\.step\(bytes','self.control_send_time(bytes'),(r'\bnothing\b','empty')])
sub(m('benchmarks/event_builder/flow_level.rs'),[(r'\bnetwork_bytes: 0,','x'),(r'self\.network_bytes','self.sent'),(r'\bcarried\b','sent'),(r'\bFlows\b','FlowNetwork'),(r'\bshare\(','update_rates('),(r'\bbefore\b','post_latency'),(r'\bafter: Picos,$','delivery_latency: Picos,'),(r'self\.after\b','self.delivery_latency'),(r'\bafter: node','delivery_latency: node'),(r'flows\.after','flows.delivery_latency'),(r'\bpolled\b','ack_latency'),(r'\bcontrol: Picos,$','control_latency: Picos,'),(r'\bcontrol: node','control_latency: node'),(r'self\.control \+','self.control_latency +'),(r'fn here\(','fn completions('),(r'\bhere\(','completions('),(r'by_filling','by_progressive_filling')])
sub(m('benchmarks/event_builder/packet_level.rs'),[(r'\bForming\b','TxPacket'),(r'\bforming\b','tx_pending'),(r'\basking\b','fetch_queue'),(r'\basked\b','fetch_bytes'),(r'\bask\(','fetch_payload('),(r'\blanding\b','rx_writing'),(r'\basks_again\b','fetch_timer_set'),(r'\bAHEAD\b','TX_BACKLOG'),(r'\bIN_PLACE\b','PLACED'),(r'\bin_place\b','placed'),(r'\bWays\b','Routes'),(r'\bways\b','routes'),(r'\bWires\b','PacketNetwork'),(r'\bwires\b','network'),(r'\bHub\b','UnitsEndpoint'),(r'\bhub\b','units_endpoint'),(r'\bFabric\b','SwitchFabric'),(r'\banswers\b','acks'),(r'\bheard\b','control_ports'),(r'\bof\b(?=\.)','node_model'),(r'let of =','let node_model ='),(r'\bstations\b','ports_used'),(r'\bSTART\b','START_TIMER'),(r'\bis_apart\b','is_remote'),(r'\bwithin\b','local_control')])
sub([M+'tests/event_builder.rs'],[(r'\bSetup\b','Scenario'),(r'\bsetup\b','scenario'),(r'Scenario::of\b','Scenario::from_site'),(r'\bSlow\b','SlowBuilder'),(r'scenario\.slow\b','scenario.slow_builders'),(r's\.slow\b','s.slow_builders'),(r'\bLevel\b','ModelLevel'),(r'\bOutcome\b','RunResult'),(r'most_held','max_buffered_batches'),(r'\.delay\[','.build_latency['),(r'\.busiest\b','.peak_link_utilization'),(r'\.most_slots','.max_slots_used')])
sub([R+'crates/cli/src/model/event_builder.rs'],[(r'\bSetup\b','Scenario'),(r'Scenario::of\b','Scenario::from_site'),(r'\bSlow\b','SlowBuilder'),(r'\bShown\b','RunSummary'),(r'\bLevel\b','ModelLevel'),(r'\bsetup\b','scenario'),(r'scenario\.slow\b','scenario.slow_builders'),(r'most_held','max_buffered_batches'),(r'outcome\.delay','outcome.build_latency'),(r'outcome\.busiest','outcome.peak_link_utilization')])
sub(m('figures.rs'),[(r'\bLoad::lhcb','ReadoutLoad::lhcb'),(r'\bLevel\b','ModelLevel'),(r'Scenario::of\b','Scenario::from_site'),(r'\bthose\(','selected('),(r'\bsmall\b','small_packet_latency')])
sub([M+'tests/analytic.rs'],[(r'\bsmall\b','small_packet_latency')])
# --- torus
sub(m('benchmarks/torus.rs'),[(r'\bStep\b','TorusHop'),(r'\bsmall\(','small_packet_latency('),(r'\bfn way\(','fn route_channels('),(r'&way\(','&route_channels('),(r'fn place\(','fn coordinates('),(r'self\.place\(','self.coordinates('),(r'\bup: bool','positive: bool'),(r'\benters: bool','enters_ring: bool'),(r'TorusHop \{ node, dimension: d, up: forward, enters: i == 0 \}','TorusHop { node, dimension: d, positive: forward, enters_ring: i == 0 }'),(r'step\.up\b','hop.positive'),(r'step\.enters\b','hop.enters_ring'),(r'\bsteps\(','hops('),(r'\bstep\b','hop'),(r'\bsteps\b','hops'),(r'\bpacket: u32','packet_size: u32'),(r'torus\.packet\b','torus.packet_size'),(r'self\.packet\b','self.packet_size'),(r'\bpacket: torus','packet_size: torus'),(r'\bhop: Picos','hop_latency: Picos'),(r'torus\.hop\b','torus.hop_latency'),(r'\bends: Picos','end_latency: Picos'),(r'torus\.ends\b','torus.end_latency')])
sub(m('figures.rs')+[M+'tests/analytic.rs'],[(r'torus\.steps\(','torus.hops('),(r'\bpacket: apenet','packet_size: apenet'),(r'\bends: Picos','end_latency: Picos'),(r'\bpacket: 4096','packet_size: 4096'),(r'\bhop: Picos','hop_latency: Picos'),(r'^        hop,','        hop_latency: hop,'),(r'torus\.ends','torus.end_latency'),(r'step\.enters','hop.enters_ring'),(r'\|step\|','|hop|'),(r'\bsteps\b','hops')])
sub(m('path/resolve.rs'),[(r'torus::\{Step, Torus\}','torus::{Torus, TorusHop}'),(r'\bStep\b','TorusHop'),(r'step\.up\b','hop_of.positive'),(r'\bstep\.','hop_of.'),(r'\|step\|','|hop_of|'),(r'\.steps\(','.hops('),(r'\bsteps\b','hops')])
# --- apenet
sub(m('benchmarks/apenet.rs'),[(r'\bPass\b','Forwarder'),(r'\bpass\b','forwarder'),(r'pub fn engine\(','pub fn dma_engine('),(r'&engine\(','&dma_engine('),(r'pub fn host\(','pub fn dma_host('),(r'&host\(p','&dma_host(p'),(r'pub fn engines\(','pub fn dma_read_bandwidth('),(r'(?<!fn )\bengines\(p','dma_read_bandwidth(p'),(r'pub fn receive\(','pub fn receive_bandwidth('),(r'receive_packets\(','receive_bandwidth_of('),(r'(?<!fn )\breceive\(p','receive_bandwidth(p'),(r'pub fn crossing\(','pub fn staging_crossover(')])
sub(m('measure.rs','figures.rs','rows/mod.rs')+[M+'tests/benchmarks.rs'],[(r'apenet::engine\(','apenet::dma_engine('),(r'apenet::host\(','apenet::dma_host('),(r'apenet::engines\(','apenet::dma_read_bandwidth('),(r'apenet::receive\(','apenet::receive_bandwidth('),(r'apenet::crossing\(','apenet::staging_crossover('),(r'figures::those\(','figures::selected(')])
# --- measure, explain, sweep, tables, calibrate
sub(m('measure.rs')+[M+'tests/benchmarks.rs',R+'crates/cli/src/model.rs'],[(r'\bTOOLS\b','BENCHMARKS'),(r'\bTool\b','Benchmark'),(r'\bDescription\b','BenchmarkInfo'),(r'\bdescription\(\)','info()'),(r'fn description\(','fn info('),(r'\bMeasureError\b','BenchmarkError'),(r'\btool\b','benchmark'),(r'fn most\(','fn max_size('),(r'\.most\(\)','.max_size()'),(r'\bNoEngine\b','NoDmaEngine'),(r'\bNoAdapter\b','NotAnAdapter'),(r'fn engine\(','fn dma_setup('),(r'= engine\(site','= dma_setup(site')])
sub([R+'crates/cli/src/args.rs'],[(r'tool: millstream_model::measure::Tool','benchmark: millstream_model::measure::Benchmark')])
sub(m('explain.rs')+[M+'tests/benchmarks.rs',R+'crates/cli/src/model.rs'],[(r'\bStation\b','ChannelLoad'),(r'\bstations\b','channels'),(r'\bstation\b','channel'),(r'\bEffect\b','Sensitivity'),(r'\beffects\b','sensitivities'),(r'\beffect\b','sensitivity'),(r'\bfollowing\(','next_limits('),(r'\bFULL\b','SATURATED'),(r'\bof_flow\b','path_prefixes'),(r'explain::\{explain, sweep\}','explain::{explain, explain_sweep}'),(r'explain::\{Flow, explain, sweep\}','explain::{Flow, explain, explain_sweep}'),(r'pub fn sweep\(','pub fn explain_sweep('),(r'(?<![\w:])sweep\(\(','explain_sweep(('),(r'result\.lines','result.channels')])
sub([M+'tests/benchmarks.rs'],[(r'(?<!\w)sweep\(\("','explain_sweep(("'),(r'sweep::\{case,','sweep::{apply,'),(r'\bcase\(','apply(')])
sub(m('sweep.rs','explain.rs')+[R+'crates/cli/src/model.rs'],[(r'\bWhatIfError\b','SweepError'),(r'sweep::case\b','sweep::apply'),(r'\bcase\(','apply('),(r'\bMOST\b','MAX_POINTS'),(r'^fn quantity\(','fn parse_quantity('),(r'\bquantity\(text','parse_quantity(text')])
sub(m('result_table.rs','explain.rs','measure.rs')+[M+'tests/benchmarks.rs',R+'crates/cli/src/model.rs'],[(r'\bSheet\b','ResultTable'),(r'\bCell\b','TableValue'),(r'\bsheet\b','table'),(r'\bbeside\b','series_columns')])
sub(m('path/mod.rs','benchmarks/perftest.rs','benchmarks/osu.rs'),[(r'\blines: Vec','channels: Vec'),(r'\blines: simulation','channels: simulation')])
sub(m('calibrate.rs','predict.rs','rows/mod.rs'),[(r'\bFamily\b','Category'),(r'\bfamily\(\)','category()'),(r'fn family\(','fn category('),(r'\bfamily\b','category'),(r'\bleast\(','minimise('),(r'\bReport\b','CalibrationReport'),(r'\btwin\b','reference'),(r'\bshown\(','significant('),(r'\bSilent\b','NotModelled'),(r'\bBuiltIn\b','Definition')])
sub([R+'crates/cli/src/model.rs'],[(r'\bReport\b','CalibrationReport')])
sub(m('lib.rs'),[(r'pub mod part;','pub mod component;'),(r'pub mod setup;','pub mod path;'),(r'pub mod sheet;','pub mod result_table;'),(r'pub mod speed;','pub mod engine_bench;'),(r'pub mod table;\n?',''),(r'pub mod tool;','pub mod benchmarks;'),(r'pub mod whatif;','pub mod sweep;'),(r'pub mod parameters;','mod parallel;\npub mod parameters;')])
sub(m('component/mod.rs'),[(r'pub mod memory;','pub(crate) mod adapter;\npub mod completer;'),(r'pub mod translation;','pub mod tlb;')])
sub(m('benchmarks/mod.rs'),[(r'^mod nic;$',''),(r'pub mod mic;','pub mod extoll;'),(r'pub mod verbs;','')])
sub(m('parameters.rs'),[(r'\bpub what:','pub description:'),(r'p\.what\b','p.description'),(r'\bpub late:','pub sampled_separately:'),(r'parameter\.late\b','parameter.sampled_separately'),(r'\bfit: Vec','fitted_to: Vec')])
# --- site
site=files(S+'src/*.rs',S+'tests/*.rs')
siteusers=site+uses+[R+'crates/cli/src/site.rs']
sub(site,[(r'\bWire\b','NetworkLink'),(r'\bNetwork\b','NetworkSwitch'),(r'\bEnd\b','LinkEnd'),(r'\bend_name\b','link_end_name'),(r'\bPluggable\b','PcieDevice'),(r'\bNoSuchCard\b','UnknownCard'),(r'schema::File\b','schema::SiteFile'),(r'\bFile\b(?=[,; {])(?!::)','SiteFile'),(r'\bcheck::','validate::'),(r'crate::card::','crate::network_card::'),(r'pub mod check;','pub mod validate;'),(r'pub mod card;','pub mod network_card;'),(r'pub use card::','pub use network_card::'),(r'site\.wires','site.links'),(r'\bpub wires:','pub links:'),(r'^        wires: Vec','        links: Vec'),(r'torus\.wires','torus.links'),(r'torus$','torus'),(r'use crate::card','use crate::network_card'),(r'\bcard::check\(','network_card::validate(')])
sub(uses+[R+'crates/cli/src/site.rs'],[(r'site\.wires','site.links'),(r'millstream_site::check::','millstream_site::validate::'),(r'site::\{(.*)\bWire\b',r'site::{\1NetworkLink'),(r'CardMemory, End, Parent','CardMemory, LinkEnd, Parent'),(r'\bEnd::',r'LinkEnd::'),(r'&Wire\b','&NetworkLink'),(r"&'a Wire\b","&'a NetworkLink")])
sub([R+'crates/cli/src/card/names.rs'],[(r'millstream_site::card::','millstream_site::network_card::')])
