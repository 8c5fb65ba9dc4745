//! `millstream card watch`: displays cards periodically.

use std::collections::HashMap;
use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::time::Instant;

use millstream_card::RemoteCard;
use millstream_card::info::CardInfo;
use serde_json::json;

use super::args::WatchOptions;
use super::{CommandContext, Outcome, connect, show};
use crate::interrupt::Interrupt;

struct Watched {
    name: String,
    address: String,
    card: Option<RemoteCard>,
    before: Option<(Instant, CardInfo)>,
}

pub(super) fn run(options: &WatchOptions, context: &CommandContext) -> Outcome {
    let device = context.device()?;
    let mut cards = Vec::new();
    if options.cards.is_empty() {
        let site = context.site()?;
        cards.extend(site.cards.into_iter().map(|entry| (entry.name, entry.address)));
    }
    for card in &options.cards {
        cards.push((card.clone(), context.names.address(card)?));
    }
    let mut cards: Vec<_> = cards
        .into_iter()
        .map(|(name, address)| Watched { name, address, card: None, before: None })
        .collect();
    let terminal = !options.once && !context.json && std::io::stdout().is_terminal();
    let interrupt = Interrupt::listen_and_leave(if terminal { Terminal::LEAVE.as_bytes() } else { b"" })?;
    let live = terminal.then(Terminal::take);
    loop {
        let mut screen = String::new();
        let mut reached = true;
        for watched in &mut cards {
            let info = watched.sample(&device);
            reached &= info.is_ok();
            if context.json {
                let line = match &info {
                    Ok((info, _)) => json!({ "name": watched.name, "info": info }),
                    Err(error) => json!({ "name": watched.name, "error": error.to_string() }),
                };
                println!("{line}");
                continue;
            }
            match info {
                Ok((info, rates)) => {
                    screen += &format!("{} at {}\n{}", watched.name, watched.address, show::whole(&info));
                    for rate in rates {
                        screen += &format!("  {rate}\n");
                    }
                }
                Err(error) => screen += &format!("{} at {}\n  {error}\n", watched.name, watched.address),
            }
            screen.push('\n');
        }
        if let Some(terminal) = &live {
            terminal.draw(&screen);
        } else {
            print!("{screen}");
        }
        std::io::stdout().flush()?;
        if options.once {
            return Ok(if reached { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        let until = Instant::now() + options.every;
        while Instant::now() < until {
            if interrupt.flow().is_break() {
                return Ok(ExitCode::SUCCESS);
            }
            let left = until.saturating_duration_since(Instant::now());
            std::thread::sleep(left.min(std::time::Duration::from_millis(50)));
        }
    }
}

/// The terminal's alternate screen, until this is dropped.
struct Terminal;

impl Terminal {
    const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";

    fn take() -> Terminal {
        // Hides the cursor and disables line wrapping.
        print!("\x1b[?1049h\x1b[?25l\x1b[?7l");
        Terminal
    }

    /// Redraws in place, without flicker or scrolling.
    fn draw(&self, picture: &str) {
        let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok();
        let rows = size.map(|size| usize::from(size.ws_row)).filter(|&rows| rows > 1).unwrap_or(usize::MAX);
        let lines: Vec<_> = picture.trim_end().lines().collect();
        let shown = if lines.len() > rows { rows - 1 } else { lines.len() };
        let mut drawn: Vec<_> = lines[..shown].iter().map(|line| format!("{line}\x1b[K")).collect();
        if shown < lines.len() {
            drawn.push(format!(
                "… {} more lines; watch fewer cards or enlarge the window\x1b[K",
                lines.len() - shown
            ));
        }
        print!("\x1b[H{}\x1b[J", drawn.join("\n"));
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        print!("{}", Self::LEAVE);
        let _ = std::io::stdout().flush();
    }
}

impl Watched {
    /// Reads the card, and its rates since the previous call.
    fn sample(&mut self, device: &millstream_rdma::Device) -> Outcome<(CardInfo, Vec<String>)> {
        let card = match self.card.take() {
            Some(card) => card,
            None => connect(device, &self.address)?,
        };
        // A card that does not answer is connected again at the next call.
        let info = CardInfo::of(&card.snapshot()?);
        self.card = Some(card);
        let now = Instant::now();
        let mut rates = Vec::new();
        if let Some((then, before)) = self.before.replace((now, info.clone())) {
            let seconds = now.duration_since(then).as_secs_f64().max(1e-6);
            let per_second = |now: &[u64], then: &[u64]| {
                let sum = |table: &[u64]| table.iter().sum::<u64>();
                show::bytes((sum(now).saturating_sub(sum(then)) as f64 / seconds) as u64)
            };
            rates.push(format!(
                "rates       RDMA {}/s in, {}/s out; card {}/s in, {}/s out",
                per_second(&info.bank_rdma_written, &before.bank_rdma_written),
                per_second(&info.bank_rdma_read, &before.bank_rdma_read),
                per_second(&info.bank_written, &before.bank_written),
                per_second(&info.bank_read, &before.bank_read),
            ));
            let busy: HashMap<usize, f64> = info
                .regions
                .iter()
                .zip(&before.regions)
                .enumerate()
                .map(|(index, (now, then))| (index, (now.busy_s - then.busy_s) / seconds))
                .collect();
            let mut busy: Vec<_> = busy.into_iter().collect();
            busy.sort_by_key(|(index, _)| *index);
            let text: Vec<_> =
                busy.iter().map(|(index, share)| format!("region {index} {:.0} %", 100.0 * share)).collect();
            rates.push(format!("utilisation {}", text.join(", ")));
        }
        Ok((info, rates))
    }
}
