//! Timeslice archives (`.tsa`) of CBM.
//!
//! Fragment: a component of a timeslice, as it is in the archive: microslice descriptors, then contents. Source: subsystem,
//! format of the content and equipment of its first microslice. Event: the index of the timeslice.
//!
//! A timeslice is its descriptor, the components, and the descriptors of the components.

use std::ops::Range;

use millstream_fragment::stream::Malformed;

use super::archive::{self, ArchiveType};
use super::microslice::{self, DESCRIPTOR, Descriptor};
use crate::cursor::{ByteOrder, Cursor, malformed};
use crate::{FileIndexer, Format};

pub(in crate::format) struct Tsa;

impl Format for Tsa {
    fn name(&self) -> &'static str {
        "tsa"
    }

    fn title(&self) -> &'static str {
        "Timeslice archives (CBM)"
    }

    fn recognises(&self, file: &[u8]) -> bool {
        archive::recognises(file, ArchiveType::Timeslices)
    }

    fn scan(&self, file: &[u8], indexer: &mut FileIndexer) -> Result<(), Malformed> {
        let mut cursor = archive::open(file, ArchiveType::Timeslices)?;
        indexer.structure("archive header", 0..cursor.at());
        let mut classes = Classes::default();
        while !cursor.is_at_end() {
            scan_timeslice(file, &mut cursor, &mut classes, indexer)?;
        }
        Ok(())
    }

    fn source_name(&self, source: u32) -> String {
        microslice::source_name(source)
    }

    fn kind(&self, source: u32) -> u32 {
        microslice::kind(source)
    }
}

/// Versions of the classes whose class information was read. Only the first object of a class has one.
#[derive(Default)]
struct Classes {
    timeslice: Option<u32>,
    timeslice_descriptor: Option<u32>,
    components: Option<u32>,
    component_descriptors: Option<u32>,
    component_descriptor: Option<u32>,
}

/// The version of a class, from its class information if this is its first object.
fn version(
    cursor: &mut Cursor<'_>,
    known: &mut Option<u32>,
    class: &str,
    newest: u32,
) -> Result<u32, Malformed> {
    match *known {
        Some(version) => Ok(version),
        None => Ok(*known.insert(archive::class_version(cursor, class, newest)?)),
    }
}

fn scan_timeslice(
    file: &[u8],
    cursor: &mut Cursor<'_>,
    classes: &mut Classes,
    indexer: &mut FileIndexer,
) -> Result<(), Malformed> {
    version(cursor, &mut classes.timeslice, "StorableTimeslice", 0)?;
    let (index, number) = read_timeslice_descriptor(cursor, classes)?;
    version(cursor, &mut classes.components, "vector of components", 0)?;
    vector_length(cursor, "number of components", number)?;
    let mut components = Vec::new();
    for _ in 0..number {
        let len = archive::length(cursor, "size of a component")?;
        components.push(cursor.take(len, "component")?);
    }
    version(cursor, &mut classes.component_descriptors, "vector of component descriptors", 0)?;
    vector_length(cursor, "number of component descriptors", number)?;
    for component in components {
        let (timeslice, microslices) = read_component_descriptor(cursor, classes, component.len())?;
        indexer.structure("descriptors of the timeslice", indexer.end()..component.start);
        match check_component(file, component.clone(), microslices)? {
            Some(source) => indexer.fragment(index.unwrap_or(timeslice), source, component),
            None => indexer.structure("component without microslices", component),
        }
    }
    indexer.structure("descriptors of the components", indexer.end()..cursor.at());
    Ok(())
}

/// The index, which the oldest version lacks, and the number of components.
fn read_timeslice_descriptor(
    cursor: &mut Cursor<'_>,
    classes: &mut Classes,
) -> Result<(Option<u64>, u32), Malformed> {
    let version = version(cursor, &mut classes.timeslice_descriptor, "TimesliceDescriptor", 2)?;
    let index = if version > 0 { Some(cursor.u64("index")?) } else { None };
    if version > 1 {
        cursor.u64("start_time")?;
        cursor.u64("duration")?;
        cursor.u32("flags")?;
    }
    cursor.u64("ts_pos")?;
    cursor.u32("num_core_microslices")?;
    Ok((index, cursor.u32("num_components")?))
}

/// The length of a vector, which the timeslice descriptor has as well, and the version of its elements.
fn vector_length(cursor: &mut Cursor<'_>, field: &str, expected: u32) -> Result<(), Malformed> {
    let at = cursor.at();
    let found = cursor.u64(field)?;
    if found != u64::from(expected) {
        return Err(malformed(at, field, found, format!("num_components, {expected}")));
    }
    cursor.u32(&format!("{field}, version"))?;
    Ok(())
}

/// The timeslice's number and the number of microslices of a component of `len` bytes.
fn read_component_descriptor(
    cursor: &mut Cursor<'_>,
    classes: &mut Classes,
    len: usize,
) -> Result<(u64, u64), Malformed> {
    let version = version(cursor, &mut classes.component_descriptor, "TimesliceComponentDescriptor", 1)?;
    let timeslice = cursor.u64("ts_num")?;
    cursor.u64("offset")?;
    let at = cursor.at();
    let size = cursor.u64("size")?;
    if size != len as u64 {
        return Err(malformed(at, "size", size, format!("the bytes of the component, {len}")));
    }
    let microslices = cursor.u64("num_microslices")?;
    if version > 0 {
        cursor.u32("flags")?;
    }
    Ok((timeslice, microslices))
}

/// Checks the microslices of a component. Returns the source of the first one.
fn check_component(file: &[u8], component: Range<usize>, microslices: u64) -> Result<Option<u32>, Malformed> {
    let mut cursor = Cursor::new(file, ByteOrder::Little);
    cursor.take(component.start, "component")?;
    let mut component = cursor.split(component.len(), "component")?;
    let descriptors = usize::try_from(microslices).unwrap_or(usize::MAX).saturating_mul(DESCRIPTOR);
    let mut descriptors = component.split(descriptors, "num_microslices, descriptors of 32 bytes")?;
    let contents = component.at()..component.at() + component.remaining();
    let mut end = contents.start;
    let mut first: Option<Descriptor> = None;
    while !descriptors.is_at_end() {
        let descriptor = Descriptor::read(&mut descriptors)?;
        let origin = first.get_or_insert(descriptor).offset;
        // Offsets count from the first microslice of the component.
        let start = (descriptor.offset.checked_sub(origin))
            .and_then(|offset| contents.start.checked_add(usize::try_from(offset).ok()?));
        let Some(content) = start
            .filter(|start| *start >= end)
            .and_then(|start| Some(start..start.checked_add(descriptor.size)?))
            .filter(|content| content.end <= contents.end)
        else {
            return Err(malformed(
                descriptor.at + 20,
                "size and offset",
                format!("{} bytes at {}", descriptor.size, descriptor.offset),
                format!(
                    "a range between {} and {}",
                    origin.saturating_add((end - contents.start) as u64),
                    origin.saturating_add(contents.len() as u64)
                ),
            ));
        };
        descriptor.check_content(file, content.clone())?;
        end = content.end;
    }
    Ok(first.map(|descriptor| descriptor.source))
}
