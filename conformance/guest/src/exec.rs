//! Running a program in a guest, from the network namespace of `run`.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use crate::error::{Error, output};

/// TCP port of the command server in a guest.
const PORT: u16 = 77;

/// Runs a command in a guest, prints its output and returns its exit status.
pub(crate) fn run(guest: u8, command: &[String]) -> Result<ExitCode, Error> {
    let address = SocketAddr::from(([10, 77, 0, guest + 1], PORT));
    let reach = |cause| Error::Reach { guest, address: address.to_string(), cause };
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(20)).map_err(reach)?;
    stream.write_all(format!("{}\n", command.join(" ")).as_bytes()).map_err(reach)?;

    // After the output follow a NUL, which programs do not print, and a line with the exit status.
    let mut out = io::stdout().lock();
    let mut lines = BufReader::new(stream);
    loop {
        let got = lines.fill_buf().map_err(reach)?;
        if got.is_empty() {
            return Err(Error::ConnectionLost(guest));
        }
        let end = got.iter().position(|byte| *byte == 0);
        let shown = end.unwrap_or(got.len());
        // Standard output is closed: the program ends with this process.
        if out.write_all(&got[..shown]).and_then(|()| out.flush()).is_err() {
            return Ok(ExitCode::FAILURE);
        }
        lines.consume(shown + usize::from(end.is_some()));
        if end.is_some() {
            break;
        }
    }
    let mut status = String::new();
    lines.read_line(&mut status).map_err(reach)?;
    status.trim().parse::<u8>().map(ExitCode::from).map_err(|_| Error::ConnectionLost(guest))
}

/// Copies a file to /bin of the guests.
pub(crate) fn put(file: &Path, guests: u8) -> Result<ExitCode, Error> {
    let text = output(Command::new("base64").arg("-w0").arg(file))?;
    let name = file.file_name().unwrap_or(file.as_os_str()).display();
    let command = format!("echo {text} | base64 -d >/bin/{name} && chmod +x /bin/{name}");
    for guest in 1..=guests {
        let code = run(guest, std::slice::from_ref(&command))?;
        if code != ExitCode::SUCCESS {
            return Ok(code);
        }
    }
    Ok(ExitCode::SUCCESS)
}
