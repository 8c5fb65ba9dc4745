//! Checkpoints of a network: a record for each column, so that any node may take any column.
//!
//! ```text
//!   part     length of each column's record (u64) │ records
//!   record   v (f64 a neuron) │ u (f64) │ last spike (i32) │ number of recent spikes (u32) │ recent: age, place (u32)
//!            │ synapses onto the column by source and delay: weight, derivative, last arrival (i32), if they are plastic
//! ```
//! Connectivity is made again from the seed. A record is written at the end of a second, so no spike of this second waits.

use millstream_application::ApplicationError;
use millstream_application::checkpoint::{CheckpointFolder, RunIdentity};

use super::SecondReport;
use crate::cut::ColumnCut;
use crate::population::Population;
use crate::synapses::Plastic;

/// The bytes of a node.
pub(super) fn part(population: &Population) -> Vec<u8> {
    let neurons = population.network.neurons as usize;
    let mut records: Vec<Vec<u8>> = (0..population.columns.len())
        .map(|rank| {
            let range = rank * neurons..(rank + 1) * neurons;
            let mut record = Vec::new();
            population.v[range.clone()].iter().for_each(|v| record.extend_from_slice(&v.to_le_bytes()));
            population.u[range.clone()].iter().for_each(|u| record.extend_from_slice(&u.to_le_bytes()));
            let last = population.fired[range].iter().map(|fired| fired.last);
            last.for_each(|last| record.extend_from_slice(&last.to_le_bytes()));
            let recent = recent_spikes(population, rank);
            record.extend_from_slice(&(recent.len() as u32).to_le_bytes());
            recent.iter().flatten().for_each(|word| record.extend_from_slice(&word.to_le_bytes()));
            record
        })
        .collect();
    let synapses = &population.synapses;
    for (stored, plastic) in synapses.stored.iter().zip(synapses.plastic.iter()) {
        let record = &mut records[stored.target as usize / neurons];
        for word in [stored.weight, plastic.derivative, plastic.arrived] {
            record.extend_from_slice(&word.to_le_bytes());
        }
    }
    let mut bytes = Vec::new();
    records.iter().for_each(|record| bytes.extend_from_slice(&(record.len() as u64).to_le_bytes()));
    records.iter().for_each(|record| bytes.extend_from_slice(record));
    bytes
}

/// Age and place of a column's spikes that still arrive somewhere.
fn recent_spikes(population: &Population, rank: usize) -> Vec<[u32; 2]> {
    let (network, column) = (&population.network, population.columns[rank]);
    let mut recent = Vec::new();
    for (age, slots) in (0..).zip(&population.arrivals) {
        let sources = slots.iter().map(|&slot| population.synapses.source(slot));
        let own = sources.filter(|source| source / network.neurons == column);
        recent.extend(own.map(|source| [age, source % network.neurons]));
    }
    recent
}

/// Sets a population from the folder's checkpoint. Returns the seconds so far.
pub(super) fn load(
    folder: &CheckpointFolder,
    identity: &RunIdentity<'_>,
    population: &mut Population,
) -> Result<Vec<SecondReport>, ApplicationError> {
    let (manifest, torus) = folder.load(identity)?;
    let cut = ColumnCut::new(&population.network, torus);
    let mut synapses: Vec<Vec<u8>> = vec![Vec::new(); population.columns.len()];
    population.arrivals.iter_mut().for_each(Vec::clear);
    for (node, file) in torus.all().zip(&manifest.parts) {
        let columns = cut.columns(node);
        if !columns.iter().any(|column| population.synapses.source_columns.contains(column)) {
            continue;
        }
        let bytes = folder.read_part(file)?;
        let wrong = |reason: &str| folder.damaged(file, reason);
        let mut reader = Reader { rest: &bytes };
        let lengths: Option<Vec<u64>> =
            columns.iter().map(|_| reader.word().map(u64::from_le_bytes)).collect();
        for (column, length) in columns.iter().zip(lengths.ok_or_else(|| wrong("no lengths of columns"))?) {
            let record = usize::try_from(length).ok().and_then(|length| reader.take(length));
            let record = record.ok_or_else(|| wrong("a column's record ends early"))?;
            let rank = population.columns.iter().position(|own| own == column);
            let rest = read_column(population, *column, rank, record);
            let rest = rest.ok_or_else(|| wrong("a column's record is too short or has a wrong spike"))?;
            if let Some(rank) = rank {
                synapses[rank] = rest.to_vec();
            }
        }
        if !reader.rest.is_empty() {
            return Err(wrong("bytes after the last record").into());
        }
    }
    set_synapses(population, &synapses).ok_or_else(|| {
        ApplicationError::Parameters("the checkpoint has another number of synapses".into())
    })?;
    population.step = manifest.step;
    serde_json::from_value(manifest.progress)
        .map_err(|error| ApplicationError::Parameters(format!("progress of the checkpoint: {error}")))
}

/// Takes a column's spikes, and its neurons if they live here. Returns the bytes of its synapses.
fn read_column<'b>(
    population: &mut Population,
    column: u32,
    rank: Option<usize>,
    record: &'b [u8],
) -> Option<&'b [u8]> {
    let neurons = population.network.neurons as usize;
    let mut reader = Reader { rest: record };
    for array in 0..2 {
        for place in 0..neurons {
            let value = f64::from_le_bytes(reader.word()?);
            if let Some(rank) = rank {
                let values = if array == 0 { &mut population.v } else { &mut population.u };
                values[rank * neurons + place] = value;
            }
        }
    }
    for place in 0..neurons {
        let last = i32::from_le_bytes(reader.word()?);
        if let Some(rank) = rank {
            population.fired[rank * neurons + place].last = last;
        }
    }
    for _ in 0..u32::from_le_bytes(reader.word()?) {
        let (age, place) = (u32::from_le_bytes(reader.word()?), u32::from_le_bytes(reader.word()?));
        let arrivals = population.arrivals.get_mut(age as usize)?;
        if place >= population.network.neurons {
            return None;
        }
        // Only some of a part's columns may have targets here.
        arrivals.extend(population.synapses.slot(column * population.network.neurons + place));
    }
    Some(reader.rest)
}

/// Sets weights, derivatives and arrivals from the bytes of each column.
fn set_synapses(population: &mut Population, columns: &[Vec<u8>]) -> Option<()> {
    let neurons = population.network.neurons as usize;
    let mut readers: Vec<Reader<'_>> = columns.iter().map(|bytes| Reader { rest: bytes }).collect();
    let synapses = &mut population.synapses;
    for (stored, plastic) in synapses.stored.iter_mut().zip(synapses.plastic.iter_mut()) {
        let reader = readers.get_mut(stored.target as usize / neurons)?;
        stored.weight = i32::from_le_bytes(reader.word()?);
        let derivative = i32::from_le_bytes(reader.word()?);
        *plastic = Plastic { derivative, arrived: i32::from_le_bytes(reader.word()?) };
    }
    readers.iter().all(|reader| reader.rest.is_empty()).then_some(())
}

/// Takes values from bytes.
struct Reader<'b> {
    rest: &'b [u8],
}

impl<'b> Reader<'b> {
    fn take(&mut self, length: usize) -> Option<&'b [u8]> {
        let (taken, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        Some(taken)
    }

    fn word<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }
}
