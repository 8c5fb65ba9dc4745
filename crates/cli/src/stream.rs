//! `millstream stream`: checks and unpacks stream files, and writes them from raw data.

use std::error::Error;
use std::process::ExitCode;

use millstream_formats::{FormatOptions, Import, Imported};
use millstream_fragment::stream::Stream;
use millstream_fragment::{Alignment, unpack};

use crate::args::StreamCommand;

pub(crate) fn run(command: &StreamCommand) -> Result<ExitCode, Box<dyn Error>> {
    match command {
        StreamCommand::Check { files } => {
            for file in files {
                check(&Stream::open(file)?)?;
            }
        }
        StreamCommand::Unpack { packed, unpacked } => {
            for file in unpack::unpack(packed, unpacked)? {
                println!("{}", file.display());
            }
        }
        StreamCommand::Import { file, out, format, events, event_id, index_divisor } => {
            let format = format.as_deref().and_then(millstream_formats::by_name);
            let import = Import {
                input: file,
                output: out,
                events: events.clone(),
                alignment: Alignment::default(),
                options: FormatOptions { event_id: *event_id, index_divisor: *index_divisor },
            };
            print_import(&import, &import.run(format)?);
        }
        StreamCommand::Formats => {
            for format in millstream_formats::all() {
                println!("{:8} {}", format.name(), format.title());
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn print_import(import: &Import<'_>, imported: &Imported) {
    println!(
        "{} ({}) -> {}: {} sources, events {} to {}, {} fragments, {} bytes",
        import.input.display(),
        imported.format,
        import.output.display(),
        imported.sources,
        imported.events.start,
        imported.events.end - 1,
        imported.fragments,
        imported.fragment_bytes,
    );
    for note in &imported.notes {
        println!("  {note}");
    }
    let outside = Some(("fragment of an event that was not selected", imported.outside));
    let rest = imported.structure.iter().map(|(what, total)| (*what, *total)).chain(outside);
    for (what, total) in rest.filter(|(_, total)| total.count > 0) {
        println!("  not written: {} × {what}, {} bytes", total.count, total.bytes);
    }
}

fn check(stream: &Stream) -> Result<(), Box<dyn Error>> {
    stream.verify_payload()?;
    let events = stream.events();
    println!(
        "{}: {} sources, events {} to {}, {} fragments, {} bytes, all checksums match",
        stream.path().display(),
        stream.sources().len(),
        events.start,
        events.end - 1,
        stream.n_fragments(),
        stream.mapping().len(),
    );
    println!("  source    kind  fragments  longest [B]  payload [B]  name");
    for source in stream.sources() {
        let payload = source.payload();
        println!(
            "  {:08x}  {:4}  {:9}  {:11}  {:11}  {}",
            source.id().0,
            source.kind().0,
            source.len(),
            source.max_len(),
            payload.end - payload.start,
            source.name(),
        );
    }
    Ok(())
}
