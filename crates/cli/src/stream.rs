//! `millstream stream`: checks and unpacks stream files.

use std::error::Error;
use std::process::ExitCode;

use millstream_fragment::stream::Stream;
use millstream_fragment::unpack;

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
    }
    Ok(ExitCode::SUCCESS)
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
