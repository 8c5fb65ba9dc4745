//! Cards on the network.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use millstream_card::control::{KernelSource, RunRequest};
use millstream_card::info::CardInfo;
use millstream_card::{LeaseToken, RemoteCard, RemoteError, RemoteErrorKind, RemoteOptions, checkpoint};
use millstream_card_abi::registers::KERNEL_WORDS;
use millstream_rdma::{DeviceSelector, device, loader};
use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::arguments::Unsigned;
use crate::errors::{card_failed, checkpoint_failed, invalid};

/// Fields of a message: kind, region, cause, sequence, values.
type MessageFields = (String, u32, Option<String>, u64, [u64; 4]);

/// The verbs library that this process has loaded, in words.
#[pyfunction]
pub(crate) fn verbs_library() -> String {
    loader::loaded().to_string()
}

/// A duration given in seconds.
fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value)
        .map_err(|error| PyValueError::new_err(format!("{name} = {value}: {error}; give seconds")))
}

/// Longest time without a look at signals, such as that of Ctrl-C.
const SIGNALS: Duration = Duration::from_millis(100);

/// Calls `wait` until it has something or `timeout` has passed, and looks at signals in between.
fn wait_in_turns<T: Send>(
    py: Python<'_>,
    timeout: Duration,
    mut wait: impl FnMut(Duration) -> Result<Option<T>, RemoteError> + Send,
) -> PyResult<Option<T>> {
    let started = Instant::now();
    loop {
        let left = timeout.saturating_sub(started.elapsed());
        let found = py.detach(|| wait(left.min(SIGNALS))).map_err(|error| card_failed(&error))?;
        if found.is_some() || left <= SIGNALS {
            return Ok(found);
        }
        py.check_signals()?;
    }
}

/// A connection to a card.
#[pyclass(frozen)]
pub(crate) struct Connection {
    card: RemoteCard,
}

#[pymethods]
impl Connection {
    #[new]
    fn connect(py: Python<'_>, address: &str, timeout: f64, staging_bytes: usize) -> PyResult<Self> {
        let options = RemoteOptions {
            timeout: seconds("timeout", timeout)?,
            staging_bytes,
            ..RemoteOptions::default()
        };
        let card = py.detach(|| {
            let device = device::open(&DeviceSelector::from_environment())
                .map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
            RemoteCard::connect(&device, address, options).map_err(|error| card_failed(&error))
        })?;
        Ok(Self { card })
    }

    #[getter]
    fn address(&self) -> &str {
        self.card.address()
    }

    #[getter]
    fn memory_bytes(&self) -> u64 {
        self.card.memory_bytes()
    }

    /// Epoch of the lease that this process holds.
    #[getter]
    fn epoch(&self, py: Python<'_>) -> Option<u32> {
        // It waits for operations of other threads.
        py.detach(|| self.card.held()).map(|held| held.epoch)
    }

    fn acquire(&self, py: Python<'_>, duration: f64, timeout: f64) -> PyResult<u32> {
        let (duration, timeout) = (seconds("duration", duration)?, seconds("timeout", timeout)?);
        let mut leased = None;
        let held = wait_in_turns(py, timeout, |turn| match self.card.acquire(duration, turn) {
            Err(error) if matches!(error.kind, RemoteErrorKind::Leased { .. }) => {
                leased = Some(error);
                Ok(None)
            }
            other => other.map(Some),
        })?;
        match (held, leased) {
            (Some(held), _) => Ok(held.epoch),
            (None, Some(leased)) => Err(card_failed(&leased)),
            (None, None) => unreachable!("a turn ends with the lease or an error"),
        }
    }

    fn release(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.card.release()).map_err(|error| card_failed(&error))
    }

    fn revoke(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        py.detach(|| self.card.revoke()).map_err(|error| card_failed(&error))
    }

    /// Detaches the lease. Returns its token as JSON.
    fn detach(&self, py: Python<'_>) -> PyResult<String> {
        let token = py.detach(|| self.card.detach()).map_err(|error| card_failed(&error))?;
        serde_json::to_string(&token).map_err(invalid)
    }

    /// Continues a detached lease, given by its token as JSON.
    fn attach(&self, py: Python<'_>, token: &str) -> PyResult<u32> {
        let token: LeaseToken = serde_json::from_str(token)
            .map_err(|error| PyValueError::new_err(format!("lease token: {error}")))?;
        py.detach(|| self.card.attach(&token)).map(|held| held.epoch).map_err(|error| card_failed(&error))
    }

    fn write(&self, py: Python<'_>, offset: Unsigned<u64>, bytes: PyReadonlyArray1<'_, u8>) -> PyResult<()> {
        let bytes = bytes.as_slice()?;
        py.detach(|| self.card.write(offset.0, bytes)).map_err(|error| card_failed(&error))
    }

    fn read(
        &self,
        py: Python<'_>,
        offset: Unsigned<u64>,
        mut out: PyReadwriteArray1<'_, u8>,
    ) -> PyResult<()> {
        let out = out.as_slice_mut()?;
        py.detach(|| self.card.read(offset.0, out)).map_err(|error| card_failed(&error))
    }

    fn load_builtin(&self, py: Python<'_>, region: Unsigned<u32>, name: &str) -> PyResult<u64> {
        py.detach(|| self.card.load(region.0, KernelSource::Builtin(name)))
            .map_err(|error| card_failed(&error))
    }

    fn load_image(
        &self,
        py: Python<'_>,
        region: Unsigned<u32>,
        image: &[u8],
        offset: Unsigned<u64>,
    ) -> PyResult<u64> {
        py.detach(|| self.card.load(region.0, KernelSource::Image { image, at: offset.0 }))
            .map_err(|error| card_failed(&error))
    }

    fn unload(&self, py: Python<'_>, region: Unsigned<u32>) -> PyResult<()> {
        py.detach(|| self.card.unload(region.0)).map_err(|error| card_failed(&error))
    }

    /// Starts a run. Returns its doorbell word. `awaited`: a thread will wait for its end, whose message is for it.
    #[pyo3(signature = (region, arguments, banks, fuel, timeout, awaited))]
    #[expect(clippy::too_many_arguments, reason = "those of the Python function")]
    fn start(
        &self,
        py: Python<'_>,
        region: Unsigned<u32>,
        arguments: Vec<Unsigned<u64>>,
        banks: Unsigned<u64>,
        fuel: Option<Unsigned<u64>>,
        timeout: Option<f64>,
        awaited: bool,
    ) -> PyResult<u64> {
        if arguments.len() > KERNEL_WORDS {
            return Err(PyValueError::new_err(format!(
                "{} arguments: a kernel takes at most {KERNEL_WORDS}",
                arguments.len()
            )));
        }
        let arguments: Vec<u64> = arguments.into_iter().map(|argument| argument.0).collect();
        let timeout = timeout.map(|timeout| seconds("timeout", timeout)).transpose()?;
        let fuel = fuel.map(|fuel| fuel.0);
        let request = RunRequest { banks: banks.0, fuel, timeout, ..RunRequest::new(&arguments) };
        let start = if awaited { RemoteCard::submit } else { RemoteCard::start };
        py.detach(|| start(&self.card, region.0, &request)).map_err(|error| card_failed(&error))
    }

    /// Waits for the end of a run, given by its doorbell word. Returns its first results.
    fn wait(&self, py: Python<'_>, doorbell: Unsigned<u64>, timeout: f64) -> PyResult<[u64; 4]> {
        let timeout = seconds("timeout", timeout)?;
        let results = wait_in_turns(py, timeout, |turn| self.card.wait_again(doorbell.0, turn));
        if let Ok(Some(results)) = results {
            return Ok(results);
        }
        // A message that comes later is for anyone.
        let late = py.detach(|| self.card.wait(doorbell.0, Duration::ZERO));
        results?;
        late.map_err(|mut error| {
            if let RemoteErrorKind::TimedOut(waited, _) = &mut error.kind {
                *waited = timeout;
            }
            card_failed(&error)
        })
    }

    fn stop(&self, py: Python<'_>, region: Unsigned<u32>) -> PyResult<bool> {
        py.detach(|| self.card.stop(region.0)).map_err(|error| card_failed(&error))
    }

    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.card.clear()).map_err(|error| card_failed(&error))
    }

    /// The next message, or none within the timeout.
    fn message(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<MessageFields>> {
        let timeout = seconds("timeout", timeout)?;
        let message = wait_in_turns(py, timeout, |turn| self.card.message(turn))?;
        Ok(message.map(|message| {
            let cause = message.cause.map(|cause| cause.to_string());
            (format!("{:?}", message.kind), message.region, cause, message.sequence, message.values)
        }))
    }

    /// The state of the card as JSON.
    fn info(&self, py: Python<'_>) -> PyResult<String> {
        let bar0 = py.detach(|| self.card.snapshot()).map_err(|error| card_failed(&error))?;
        serde_json::to_string(&CardInfo::of(&bar0)).map_err(invalid)
    }

    /// Saves the card. Returns the content of the checkpoint as JSON.
    fn save(&self, py: Python<'_>, file: PathBuf) -> PyResult<String> {
        let summary = py
            .detach(|| checkpoint::save(&self.card, &file, |_, _| ()))
            .map_err(|error| checkpoint_failed(&error))?;
        serde_json::to_string(&summary).map_err(invalid)
    }

    /// Restores the card. Returns the content of the checkpoint as JSON.
    fn restore(&self, py: Python<'_>, file: PathBuf) -> PyResult<String> {
        let summary = py
            .detach(|| checkpoint::restore(&self.card, &file, |_, _| ()))
            .map_err(|error| checkpoint_failed(&error))?;
        serde_json::to_string(&summary).map_err(invalid)
    }
}
