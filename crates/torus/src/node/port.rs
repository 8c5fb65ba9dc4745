//! The place of an application at its node: control memory, mailbox, and the connection while one is attached.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use millstream_fabric::RegionId;
use millstream_rdma::{Access, Device};
use millstream_shm::EventFd;
use millstream_shm::socket::Connection;
use millstream_torus_core::{Dimensions, NodeNumber, router};

use super::registration::{MemoryKeeper, Registrations};
use crate::attach::{AttachReply, AttachRequest, receive, send};
use crate::card::LeasedCard;
use crate::control::{Command, Completion, Control, ControlError, MAX_COMMANDS};
use crate::engine::{Engine, Event, Failure, Operation, OutsideAccess, Span};
use crate::exchange::mailbox_bytes;
use crate::memory::Memory;
use crate::seventh::directory::{
    self, DIRECTORY, DIRECTORY_BYTES, MAX_NAME, MAX_PUBLISHED, PublishedRegion, is_valid_name,
};

/// Name of the card's memory for hosts outside.
const CARD: &str = "card";
/// Commands that one look takes, so that packets are not kept waiting.
const COMMANDS_PER_POLL: usize = 64;

/// Memory for one application, before and while it is attached.
#[derive(Debug)]
pub(super) struct Port {
    device: Device,
    card: Option<Arc<LeasedCard>>,
    torus: Dimensions,
    here: NodeNumber,
    mailbox: RegionId,
    directory: Arc<Memory>,
    published: Vec<PublishedRegion>,
    control: Control,
    descriptors: [OwnedFd; 2],
    wake: Arc<EventFd>,
    connection: Option<Arc<Connection>>,
    keeper: MemoryKeeper,
    registrations: Registrations,
}

impl Port {
    pub(super) fn new(
        device: &Device,
        card: Option<Arc<LeasedCard>>,
        publish_card: bool,
        engine: &mut Engine,
        mailbox: RegionId,
        keeper: &MemoryKeeper,
    ) -> io::Result<Port> {
        let (torus, here) = (engine.dimensions(), engine.here());
        let (control, control_fd) = Control::create(Some(device))?;
        if card.as_ref().is_some_and(|card| !card.is_leased()) {
            control.set_card_gone();
        }
        let access = Some((device, Access::LOCAL_WRITE));
        let (memory, mailbox_fd) =
            Memory::allocate("millstream-torus-mailbox", mailbox_bytes(torus.nodes()), access)?;
        engine.regions.add_known(mailbox, Arc::new(memory));
        let (directory, _) = Memory::allocate("millstream-torus-directory", DIRECTORY_BYTES, access)?;
        let directory = Arc::new(directory);
        engine.regions.add_known(DIRECTORY, Arc::clone(&directory));
        engine.regions.publish(DIRECTORY, OutsideAccess::Read);
        let wake = Arc::new(EventFd::latch()?);
        let mut port = Port {
            device: device.clone(),
            card,
            torus,
            here,
            mailbox,
            directory,
            published: Vec::new(),
            control,
            descriptors: [control_fd, mailbox_fd],
            registrations: Registrations::new(device, &wake),
            keeper: keeper.clone(),
            wake,
            connection: None,
        };
        if publish_card {
            port.publish_card(engine)?;
        }
        Ok(port)
    }

    /// Lets hosts outside of the torus use the whole memory of the card, while it is leased.
    fn publish_card(&mut self, engine: &mut Engine) -> io::Result<()> {
        let Some(card) = self.card.as_ref().filter(|card| card.is_leased()) else { return Ok(()) };
        let size = card.size();
        let length = usize::try_from(size).map_err(io::Error::other)?;
        let memory = Memory::of_card(card, 0, length, &self.device, Access::LOCAL_WRITE)?;
        let region = engine.regions.add(self.keeper.keep(memory));
        let access = OutsideAccess::ReadWrite;
        engine.regions.publish(region, access);
        self.published.push(PublishedRegion { name: CARD.to_owned(), region, size, access });
        self.write_directory();
        Ok(())
    }

    pub(super) fn control(&self) -> &Control {
        &self.control
    }

    pub(super) fn wake(&self) -> &Arc<EventFd> {
        &self.wake
    }

    pub(super) fn connection(&self) -> Option<&Arc<Connection>> {
        self.connection.as_ref()
    }

    /// Takes an application, if there is none. Its connection does not block. Returns whether it is attached.
    pub(super) fn attach(
        &mut self,
        connection: Arc<Connection>,
        request: &AttachRequest,
    ) -> io::Result<bool> {
        let reason = if !request.is_attach() {
            Some("it has another version than this node process".to_owned())
        } else {
            let other = self.connection.as_ref();
            other.map(|other| format!("process {} is attached to {} already", other.peer().pid, self.here))
        };
        if let Some(reason) = reason {
            send(&connection, &AttachReply::Failed { reason }, &[])?;
            return Ok(false);
        }
        let reply = AttachReply::Attached {
            dimensions: self.torus.to_string(),
            node: self.here.0.into(),
            mailbox: self.mailbox.0,
        };
        let [control, mailbox] = &self.descriptors;
        send(&connection, &reply, &[control.as_fd(), mailbox.as_fd(), self.wake.as_fd()])?;
        self.connection = Some(connection);
        Ok(true)
    }

    /// Answers a request of the application. An error means that it is gone.
    pub(super) fn serve(&mut self, engine: &mut Engine) -> io::Result<()> {
        let Some(connection) = self.connection.clone() else { return Ok(()) };
        let (request, descriptors) = match receive::<AttachRequest>(&connection) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            other => other?,
        };
        let failed = |reason: String| AttachReply::Failed { reason };
        let mut memory = None;
        let reply = match request {
            AttachRequest::Attach { .. } | AttachRequest::Monitor => {
                failed("this application is attached".to_owned())
            }
            AttachRequest::Register { length } => {
                // The answer follows: [`Port::finish_registrations`].
                return self.registrations.begin(descriptors.into_iter().next(), length);
            }
            AttachRequest::RegisterCard { offset, length } => {
                match self.register_card(engine, offset, length)? {
                    Some((region, descriptor)) => {
                        memory = Some(descriptor);
                        AttachReply::Region { region: region.0 }
                    }
                    None => AttachReply::NoCard,
                }
            }
            AttachRequest::Card => match self.card.as_ref().filter(|card| card.is_leased()) {
                Some(card) => AttachReply::Card { name: card.name().to_string(), epoch: card.epoch() },
                None => AttachReply::NoCard,
            },
            AttachRequest::Deregister { region } => {
                // Neither the mailbox nor the directory is the application's.
                if ![self.mailbox, DIRECTORY].contains(&RegionId(region)) {
                    self.withdraw(RegionId(region));
                    engine.regions.remove(RegionId(region));
                }
                AttachReply::Region { region }
            }
            AttachRequest::Publish { region, name, writable } => {
                match self.publish(engine, RegionId(region), name, writable) {
                    Ok(()) => AttachReply::Region { region },
                    Err(reason) => failed(reason),
                }
            }
        };
        let memory: Vec<_> = memory.iter().map(OwnedFd::as_fd).collect();
        send(&connection, &reply, &memory)
    }

    /// Answers the application whose memory is registered. An error means that it is gone.
    pub(super) fn finish_registrations(&mut self, engine: &mut Engine) -> io::Result<()> {
        while let Some((length, registered)) = self.registrations.poll() {
            let reply = match registered {
                Ok(memory) => AttachReply::Region { region: engine.regions.add(self.keeper.keep(memory)).0 },
                Err(error) => AttachReply::Failed { reason: format!("{length} bytes: {error}") },
            };
            if let Some(connection) = &self.connection {
                send(connection, &reply, &[])?;
            }
        }
        Ok(())
    }

    /// Lets hosts outside of the torus use a region by a name.
    fn publish(
        &mut self,
        engine: &mut Engine,
        region: RegionId,
        name: String,
        writable: bool,
    ) -> Result<(), String> {
        if !is_valid_name(&name) {
            return Err(format!(
                "{name:?}: a name has 1 to {MAX_NAME} printable ASCII characters without spaces"
            ));
        }
        if [self.mailbox, DIRECTORY].contains(&region) {
            return Err(format!("region {:#018x} is not the application's", region.0));
        }
        if self.published.iter().any(|other| other.name == name && other.region != region) {
            return Err(format!("{name:?} is the name of another region of {}", self.here));
        }
        if self.published.iter().filter(|other| other.region != region).count() >= MAX_PUBLISHED {
            return Err(format!("{} has published {MAX_PUBLISHED} regions: deregister one first", self.here));
        }
        let access = if writable { OutsideAccess::ReadWrite } else { OutsideAccess::Read };
        let size = (engine.regions.range(region, 0, 0))
            .map_err(|_| format!("{} has no region {:#018x}", self.here, region.0))?
            .size();
        engine.regions.publish(region, access);
        self.published.retain(|other| other.region != region);
        self.published.push(PublishedRegion { name, region, size, access });
        self.write_directory();
        Ok(())
    }

    /// A region ends: so does its name.
    fn withdraw(&mut self, region: RegionId) {
        self.published.retain(|other| other.region != region);
        self.write_directory();
    }

    fn write_directory(&self) {
        // As long as the memory.
        let _ = self.directory.store(0, &directory::encode(&self.published));
    }

    /// A region in the card's memory, and a descriptor of that memory; `None` if there is no such memory.
    fn register_card(
        &self,
        engine: &mut Engine,
        offset: u64,
        length: u64,
    ) -> io::Result<Option<(RegionId, OwnedFd)>> {
        let Some(card) = self.card.as_ref().filter(|card| card.is_leased()) else { return Ok(None) };
        let Ok(length) = usize::try_from(length) else { return Ok(None) };
        match Memory::of_card(card, offset, length, &self.device, Access::LOCAL_WRITE) {
            Ok(memory) => Ok(Some((engine.regions.add(self.keeper.keep(memory)), card.descriptor()?))),
            Err(error) => {
                tracing::warn!("{}: card {}: {error}", self.here, card.name());
                Ok(None)
            }
        }
    }

    /// Gives the application's commands to the engine, some at a time. Returns whether there were any.
    pub(super) fn take_commands(&mut self, engine: &mut Engine) -> Result<bool, ControlError> {
        self.take(engine, COMMANDS_PER_POLL)
    }

    /// Gives the engine what the application posted before it went.
    pub(super) fn take_last_commands(&mut self, engine: &mut Engine) -> Result<(), ControlError> {
        // No more: another process may still have the memory.
        self.take(engine, MAX_COMMANDS as usize).map(drop)
    }

    fn take(&mut self, engine: &mut Engine, most: usize) -> Result<bool, ControlError> {
        if self.connection.is_none() {
            return Ok(false);
        }
        let mut worked = false;
        for _ in 0..most {
            let Some(command) = self.control.take_command()? else { break };
            worked = true;
            match self.operation(engine, &command) {
                Ok(operation) => engine.post(router::Port::Local, operation),
                Err(failure) => {
                    let completion = Completion { cookie: command.cookie, value: 0, failure: Some(failure) };
                    self.control.complete(completion)?;
                    self.control.signal_completions();
                }
            }
        }
        Ok(worked)
    }

    fn operation(&self, engine: &mut Engine, command: &Command) -> Result<Operation, Failure> {
        command.operation(|local, at, length| {
            if local == RegionId(0) {
                let offset = Control::staging(at, length).ok_or(Failure::Access)?;
                engine.count_staged(length);
                return Ok(Span { memory: Arc::clone(self.control.memory()), offset });
            }
            let memory = engine.regions.range(local, at, length.into())?;
            Ok(Span { memory: Arc::clone(memory), offset: at })
        })
    }

    /// Tells the application what happened. Notifications that come before one is attached are kept for it.
    pub(super) fn report(&mut self, engine: &mut Engine) -> Result<bool, ControlError> {
        let (mut completed, mut notified) = (false, false);
        while let Some(event) = engine.poll_event(router::Port::Local) {
            match event {
                Event::Completed { cookie, value, failure } => {
                    completed = true;
                    self.control.complete(Completion { cookie, value, failure })?;
                }
                Event::Counter { index, add } => {
                    notified = true;
                    self.control.raise(index, add);
                }
                Event::Notification(event) => {
                    notified = true;
                    self.control.notify(&event)?;
                }
            }
        }
        if notified {
            self.control.signal();
        } else if completed {
            self.control.signal_completions();
        }
        Ok(completed || notified)
    }
}
