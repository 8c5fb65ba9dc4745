//! The checks of the spiking network: published equations spike by spike, the same spikes for every cut, resumption.

use std::fmt::Write as _;
use std::process::Command;

use millstream_application::{ApplicationError, FailAt, TorusApplication, run_on_threads};
use millstream_fabric::FabricError;
use millstream_neurons::simulation::{SimulationOptions, SimulationReport};
use millstream_neurons::{ColumnCut, Model, Network, Population, UNITS_PER_MV, reaches};
use millstream_torus_core::{Dimensions, NodeNumber};

fn network(grid: [u32; 2]) -> Network {
    Network {
        grid,
        neurons: 100,
        synapses: 30,
        shares: [760, 120, 80, 40],
        longest_delay: 20,
        excitatory_weight: 9 * UNITS_PER_MV,
        inhibitory_weight: -5 * UNITS_PER_MV,
        is_plastic: true,
        model: Model::Izhikevich,
        seed: 3,
    }
}

fn options(network: Network, steps: u64) -> SimulationOptions {
    SimulationOptions {
        network,
        steps,
        checkpoint: None,
        checkpoint_every: 1,
        resume: false,
        fail_at: None,
        raster: 100,
        on_card: false,
    }
}

fn run(dimensions: &str, options: &SimulationOptions) -> SimulationReport {
    options.run_on_threads(dimensions.parse().unwrap()).unwrap()
}

#[test]
fn spikes_equal_the_published_program() {
    let steps = 2200;
    let network = Network { synapses: 40, ..network([2, 2]) };
    let all: Vec<u32> = (0..network.columns()).collect();
    let mut population = Population::new(&network, &all).unwrap();
    let mut text = String::new();
    let neurons = network.columns() * network.neurons;
    let (n, ne) = (network.neurons, network.excitatory());
    writeln!(text, "{neurons} {} {} {n} {ne} {steps}", network.synapses, network.longest_delay).unwrap();
    for step in 0..steps {
        let inputs = all.iter().map(|&column| network.input(column, step).to_string());
        writeln!(text, "{}", inputs.collect::<Vec<_>>().join(" ")).unwrap();
    }
    for neuron in 0..neurons {
        write!(text, "{}", network.weight_of(neuron)).unwrap();
        for synapse in network.synapses_of(neuron) {
            write!(text, " {} {}", synapse.target, synapse.delay - 1).unwrap();
        }
        text.push('\n');
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("network");
    std::fs::write(&file, text).unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/spnet.py");
    // Debian's interpreter, for which `make setup` installs numpy.
    let output = Command::new("/usr/bin/python3").arg(script).arg(&file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let published = String::from_utf8(output.stdout).unwrap();

    let mut spikes = String::new();
    let mut count = 0;
    for step in 0..steps {
        for neuron in population.step_alone() {
            writeln!(spikes, "{step} {neuron}").unwrap();
            count += 1;
        }
    }
    writeln!(spikes, "weight {}", population.weight_sum()).unwrap();
    assert!(count > 5000, "{count} spikes: the network is silent");
    let differs = spikes.lines().zip(published.lines()).position(|(ours, theirs)| ours != theirs);
    assert_eq!(differs, None, "line {differs:?}");
    assert_eq!(spikes.lines().count(), published.lines().count());
}

#[test]
fn every_shape_gives_the_same_spikes_and_weights() {
    for (is_plastic, model) in
        [(true, Model::Izhikevich), (false, Model::Izhikevich), (true, Model::IgnoreAndFire { period: 70 })]
    {
        let options = options(Network { is_plastic, model, ..network([5, 4]) }, 1300);
        let alone = run("1x1x1", &options);
        assert!(alone.seconds.iter().all(|second| second.spikes > 500), "{:?}", alone.seconds);
        for dimensions in ["2x1x1", "1x2x1", "2x2x1", "1x1x4", "4x2x1", "2x2x2", "8x1x1", "5x4x1"] {
            let report = run(dimensions, &options);
            assert_eq!(report.seconds, alone.seconds, "{dimensions}");
            assert_eq!(report.state, alone.state, "{dimensions}");
            assert_eq!(report.raster, alone.raster, "{dimensions}");
            assert_eq!(report.synapses, 5 * 4 * 100 * 30);
        }
    }
}

#[test]
fn a_lost_node_is_named_and_the_run_resumes_on_other_shapes() {
    let network = network([4, 4]);
    let expected = run("1x1x1", &options(network.clone(), 3400));
    for (first, then) in [("2x2x2", "7x1x1"), ("1x1x2", "1x1x1"), ("4x1x1", "1x3x1")] {
        let folder = tempfile::tempdir().unwrap();
        let saving = SimulationOptions {
            checkpoint: Some(folder.path().to_owned()),
            ..options(network.clone(), 3400)
        };
        let failing =
            SimulationOptions { fail_at: Some(FailAt { node: NodeNumber(1), step: 2345 }), ..saving.clone() };
        let results = run_on_threads(first.parse().unwrap(), |node| failing.run(node));
        for (node, result) in results.into_iter().enumerate() {
            match (node, result.unwrap_err()) {
                (1, ApplicationError::ToldToFail { step: 2345 }) => {}
                (0 | 2.., ApplicationError::Fabric(FabricError::NodeLost { .. })) => {}
                (node, error) => panic!("node {node}: {error}"),
            }
        }
        let resumed = run(then, &SimulationOptions { resume: true, ..saving });
        assert_eq!(resumed.resumed_after, Some(2000), "{first} to {then}");
        assert_eq!(resumed.seconds, expected.seconds, "{first} to {then}");
        assert_eq!(resumed.state, expected.state, "{first} to {then}");
    }
}

#[test]
fn a_checkpoint_of_another_network_is_refused_by_field() {
    let folder = tempfile::tempdir().unwrap();
    let saving =
        SimulationOptions { checkpoint: Some(folder.path().to_owned()), ..options(network([2, 1]), 1000) };
    run("1x1x1", &saving);
    let other = SimulationOptions { network: Network { seed: 4, ..network([2, 1]) }, resume: true, ..saving };
    let error = other.run_on_threads("1x1x1".parse().unwrap()).unwrap_err().to_string();
    assert!(error.contains("seed is 3, but this run has 4"), "{error}");
}

#[test]
fn a_raster_longer_than_the_run_has_all_of_it() {
    let whole = SimulationOptions { raster: 300, ..options(network([2, 1]), 300) };
    let longer = SimulationOptions { raster: u64::MAX, ..whole.clone() };
    assert_eq!(run("1x1x1", &longer).raster, run("1x1x1", &whole).raster);
}

#[test]
fn a_network_is_not_resumed_with_a_shorter_duration() {
    let folder = tempfile::tempdir().unwrap();
    let saving =
        SimulationOptions { checkpoint: Some(folder.path().to_owned()), ..options(network([2, 1]), 1000) };
    run("1x1x1", &saving);
    let shorter = SimulationOptions { steps: 600, resume: true, ..saving };
    let error = shorter.run_on_threads("2x1x1".parse().unwrap()).unwrap_err().to_string();
    assert_eq!(error, "--duration 600: the checkpoint is that of 1000 ms");
}

#[test]
fn synapses_follow_the_rules() {
    let network = network([8, 8]);
    let mut shares = [0_u32; 4];
    for source in (0..network.columns() * network.neurons).step_by(7) {
        let synapses = network.synapses_of(source);
        assert_eq!(synapses.len(), 30);
        let mut targets: Vec<_> = synapses.iter().map(|synapse| synapse.target).collect();
        targets.sort_unstable();
        targets.dedup();
        assert_eq!(targets.len(), 30, "no target twice");
        assert!(!targets.contains(&source), "not itself");
        assert!(synapses.is_sorted_by_key(|synapse| synapse.delay));
        let (from, is_excitatory) = (source / network.neurons, network.is_excitatory(source));
        for synapse in synapses {
            let to = synapse.target / network.neurons;
            assert!(reaches(&network, from, to));
            if is_excitatory {
                assert!((1..=20).contains(&synapse.delay));
                let (a, b) = (network.place(from), network.place(to));
                let along = |axis: usize| a[axis].abs_diff(b[axis]).min(8 - a[axis].abs_diff(b[axis]));
                shares[along(0).max(along(1)) as usize] += 1;
            } else {
                assert!(to == from && synapse.delay == 1 && network.is_excitatory(synapse.target));
            }
        }
    }
    let all: u32 = shares.iter().sum();
    for (share, wanted) in shares.iter().zip([0.76, 0.12, 0.08, 0.04]) {
        assert!((f64::from(*share) / f64::from(all) - wanted).abs() < 0.01, "{shares:?}");
    }
}

#[test]
fn each_column_has_one_node() {
    for dimensions in ["1x1x1", "2x2x2", "3x1x4", "8x4x1"] {
        let torus: Dimensions = dimensions.parse().unwrap();
        let mut columns = ColumnCut::new(&network([7, 5]), torus).all().concat();
        columns.sort_unstable();
        assert_eq!(columns, (0..35).collect::<Vec<_>>(), "{dimensions}");
    }
}

#[test]
fn impossible_networks_are_refused_by_field() {
    let wrong = |change: fn(&mut Network)| {
        let mut network = network([2, 2]);
        change(&mut network);
        network.check().unwrap_err().to_string()
    };
    assert!(
        wrong(|network| network.synapses = 41).contains("synapses of a neuron is 41; it must be 1 to 40")
    );
    assert!(wrong(|network| network.shares = [500, 0, 0, 0]).contains("1000"));
    assert!(wrong(|network| network.longest_delay = 21).contains("longest delay is 21"));
    assert!(wrong(|network| network.grid = [0, 1]).contains("columns along x is 0"));
    assert!(wrong(|network| network.model = Model::IgnoreAndFire { period: 0 }).contains("period"));
}

#[test]
fn a_node_with_more_synapses_than_its_arrays_count_is_refused() {
    let network = Network { neurons: 1000, synapses: 400, ..network([110, 110]) };
    let all: Vec<u32> = (0..network.columns()).collect();
    let error = Population::new(&network, &all).unwrap_err().to_string();
    assert_eq!(error, "a node has 4840000000 synapses; it must be at most 4294967295; use more nodes");
}

#[test]
fn a_source_fires_at_most_once_in_a_step() {
    let network = network([2, 1]);
    let all: Vec<u32> = (0..network.columns()).collect();
    let mut population = Population::new(&network, &all).unwrap();
    assert!(population.receive(0..network.columns() * network.neurons));
    assert!(!population.receive([0]));
}
