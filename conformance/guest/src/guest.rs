//! Guests under QEMU, their consoles, and the command that runs beside them.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::image::Image;
use crate::network::{MTU, Tap, exit_code};

/// A virtual machine, killed when dropped.
#[derive(Debug)]
pub(crate) struct Guest {
    number: u8,
    qemu: Child,
    lines: Receiver<String>,
    /// Console output so far.
    console: String,
}

/// Time limit for booting under software emulation on a loaded machine.
const BOOT_TIMEOUT: Duration = Duration::from_secs(600);

impl Guest {
    pub(crate) fn start(image: &Image, memory: u32, tap: &Tap) -> Result<Self, Error> {
        let number = tap.guest;
        let mut qemu = Command::new("setpriv");
        // QEMU ends with this process. Always TCG: nested KVM may be offered but not work, and QEMU does not fall
        // back.
        qemu.args(["--pdeathsig", "KILL", "--", "qemu-system-x86_64", "-accel", "tcg,thread=multi"]);
        qemu.args(["-machine", "q35", "-cpu", "max", "-smp", "1", "-nodefaults", "-no-reboot"]);
        qemu.args(["-m", &memory.to_string()]);
        qemu.args(["-display", "none", "-serial", "stdio"]);
        qemu.arg("-kernel").arg(&image.kernel).arg("-initrd").arg(&image.initramfs);
        let line = format!("console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable guest={}", number + 1);
        qemu.args(["-append", &line]);
        qemu.args(["-netdev", &format!("tap,id=net,ifname={},script=no,downscript=no", tap.name)]);
        let mac = format!("52:54:00:77:00:{:02x}", number + 1);
        qemu.args(["-device", &format!("virtio-net-pci,netdev=net,mac={mac},host_mtu={MTU}")]);
        qemu.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let start = |cause| Error::Start { program: "qemu-system-x86_64".into(), cause };
        let mut qemu = qemu.spawn().map_err(start)?;
        let (sender, lines) = mpsc::channel();
        let pipes: [Option<Box<dyn std::io::Read + Send>>; 2] = [
            qemu.stdout.take().map(|pipe| Box::new(pipe) as _),
            qemu.stderr.take().map(|pipe| Box::new(pipe) as _),
        ];
        for pipe in pipes.into_iter().flatten() {
            let sender = sender.clone();
            // Ends with QEMU.
            std::thread::spawn(move || {
                for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
                    if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                        return;
                    }
                }
            });
        }
        Ok(Self { number, qemu, lines, console: String::new() })
    }

    /// Waits until the guest has its rxe adapter and accepts commands.
    pub(crate) fn wait_until_ready(&mut self) -> Result<(), Error> {
        let began = Instant::now();
        let ready_prefix = format!("guest {}: ", self.number + 1);
        loop {
            let left = BOOT_TIMEOUT.saturating_sub(began.elapsed());
            let line = match self.lines.recv_timeout(left) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => return Err(self.failed("did not boot in time")),
                Err(RecvTimeoutError::Disconnected) => return Err(self.failed("ended during boot")),
            };
            if let Some(message) = line.trim().strip_prefix(&ready_prefix) {
                eprintln!("guest {}: {} after {:.1} s", self.number, message, began.elapsed().as_secs_f64());
                return Ok(());
            }
            self.console += &line;
            self.console.push('\n');
        }
    }

    /// Whether QEMU has ended, which is an error.
    fn has_ended(&mut self) -> bool {
        !matches!(self.qemu.try_wait(), Ok(None))
    }

    fn failed(&mut self, what: &str) -> Error {
        while let Ok(line) = self.lines.try_recv() {
            self.console += &line;
            self.console.push('\n');
        }
        Error::Guest { guest: self.number, what: what.to_owned(), console: self.console.clone() }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // Fail only if it has ended.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// Runs the command and returns its exit status, or the error of a guest that ended during it.
pub(crate) fn run(command: &[String], guests: &mut [Guest]) -> Result<ExitCode, Error> {
    let start = |cause| Error::Start { program: command[0].clone(), cause };
    let mut child = Command::new(&command[0]).args(&command[1..]).spawn().map_err(start)?;
    let status = child.wait().map_err(start)?;
    match guests
        .iter_mut()
        .find_map(|guest| guest.has_ended().then(|| guest.failed("ended during the command")))
    {
        Some(error) => Err(error),
        None => Ok(exit_code(status)),
    }
}
