//! Commands as programs write them: parsed, executed, and answered at the address in the command.
//!
//! Program and connection manager share one address space. The kernel copies answers all the same, so that a bad address in
//! a command is an error (`user_memory`).

use std::os::fd::RawFd;

use crate::abi::{self, Header, MAX_PRIVATE, Plain, cmd, query};
use crate::address::{Address, LEN};
use crate::manager::Manager;
use crate::system::{ChannelId, System};
use crate::{Errno, Result, user_memory};

const EINVAL: Errno = Errno(libc::EINVAL);

const OPTION_ID: u32 = 0;
const OPTION_ID_TOS: u32 = 0;
const OPTION_ID_REUSEADDR: u32 = 1;
const OPTION_ID_AFONLY: u32 = 2;
const OPTION_ID_ACK_TIMEOUT: u32 = 3;

/// A command with its body.
#[derive(Clone, Copy, Debug)]
pub struct Command<'a> {
    header: Header,
    body: &'a [u8],
}

impl<'a> Command<'a> {
    /// Parses the bytes of a write.
    ///
    /// # Errors
    /// EINVAL for a malformed command, ENOSYS for the one that the kernel does not implement either.
    pub fn parse(written: &'a [u8]) -> Result<Self> {
        let (header, rest) = written.split_at_checked(size_of::<Header>()).ok_or(EINVAL)?;
        let header = Header::from_prefix(header);
        let body = rest.get(..usize::from(header.len_in)).ok_or(EINVAL)?;
        match header.cmd {
            cmd::GET_OPTION => Err(Errno(libc::ENOSYS)),
            cmd::COUNT.. => Err(EINVAL),
            _ => Ok(Self { header, body }),
        }
    }

    /// Whether the command is GET_EVENT, which may block.
    #[must_use]
    pub fn is_get_event(&self) -> bool {
        self.header.cmd == cmd::GET_EVENT
    }

    /// The source channel of MIGRATE_ID.
    #[must_use]
    pub fn source_channel(&self) -> Option<RawFd> {
        let fd = || abi::MigrateId::from_prefix(self.body).fd.cast_signed();
        (self.header.cmd == cmd::MIGRATE_ID).then(fd)
    }

    /// Writes as much of the answer as the program has room for.
    ///
    /// # Safety
    /// The address is writable for as many bytes as the header says.
    unsafe fn answer(&self, to: u64, answer: &impl Plain, min_len: usize) -> Result<()> {
        let bytes = answer.bytes();
        let room = usize::from(self.header.len_out);
        if room < min_len {
            return Err(Errno(libc::ENOSPC));
        }
        if to == 0 {
            return Err(Errno(libc::EFAULT));
        }
        // SAFETY: the caller vouches for the address.
        unsafe { user_memory::write(to, &bytes[..bytes.len().min(room)]) }
    }

    /// # Safety
    /// As for [`answer`](Self::answer).
    unsafe fn answer_number(&self, to: u64, number: u32) -> Result<()> {
        // SAFETY: the caller vouches for the address.
        unsafe { self.answer(to, &Number(number), size_of::<Number>()) }
    }

    /// Executes GET_EVENT; returns whether more events wait, or `None` if there is none.
    ///
    /// # Errors
    /// ENOSPC if the answer does not fit; EFAULT if it cannot be written. The event is kept then.
    ///
    /// # Safety
    /// The addresses in the command are valid.
    pub unsafe fn get_event(&self, manager: &mut Manager, channel: ChannelId) -> Result<Option<bool>> {
        /// Answer length of programs older than enhanced connection establishment.
        const MIN_LEN: usize = size_of::<abi::EventAnswer>() - size_of::<abi::Ece>() - size_of::<u32>();
        if usize::from(self.header.len_out) < MIN_LEN {
            return Err(Errno(libc::ENOSPC));
        }
        let Some(event) = manager.peek_event(channel) else { return Ok(None) };
        let body = abi::GetEvent::from_prefix(self.body);
        // SAFETY: the caller vouches for the addresses.
        unsafe { self.answer(body.response, event, MIN_LEN)? };
        Ok(manager.next_event(channel).map(|(_, last)| !last))
    }

    /// Executes any other command. `from` is the channel of [`source_channel`](Self::source_channel).
    ///
    /// # Errors
    /// The kernel's errno.
    ///
    /// # Safety
    /// The addresses in the command are valid.
    pub unsafe fn run(
        &self,
        manager: &mut Manager,
        system: &mut dyn System,
        channel: ChannelId,
        from: Option<ChannelId>,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the addresses in the command.
        unsafe {
            match self.header.cmd {
                cmd::CREATE_ID => {
                    let body = abi::CreateId::from_prefix(self.body);
                    let id = manager.create(system, channel, body.uid, body.ps, body.qp_type)?;
                    let answered = self.answer_number(body.response, id);
                    if answered.is_err() {
                        manager.destroy(system, channel, id)?;
                    }
                    answered
                }
                cmd::DESTROY_ID => {
                    let body = abi::DestroyId::from_prefix(self.body);
                    let reported = manager.destroy(system, channel, body.id)?;
                    self.answer_number(body.response, reported)
                }
                cmd::LEAVE_MCAST => {
                    let body = abi::DestroyId::from_prefix(self.body);
                    let reported = manager.leave(channel, body.id)?;
                    self.answer_number(body.response, reported)
                }
                cmd::MIGRATE_ID => {
                    let body = abi::MigrateId::from_prefix(self.body);
                    let reported = manager.migrate(system, from.ok_or(EINVAL)?, body.id, channel)?;
                    self.answer_number(body.response, reported)
                }
                cmd::JOIN_IP_MCAST => {
                    let body = abi::JoinIpMcast::from_prefix(self.body);
                    let address = Address::parse(&body.addr)?;
                    let group = manager.join(system, channel, body.id, body.uid, address)?;
                    self.answer_number(body.response, group)
                }
                cmd::JOIN_MCAST => {
                    let body = abi::JoinMcast::from_prefix(self.body);
                    let address = sized_address(&body.addr, body.addr_size)?.ok_or(EINVAL)?;
                    let group = manager.join(system, channel, body.id, body.uid, address)?;
                    self.answer_number(body.response, group)
                }
                cmd::QUERY_ROUTE => {
                    let body = abi::Query::from_prefix(self.body);
                    let answer = manager.query_route(system, channel, body.id)?;
                    self.answer(body.response, &answer, size_of_val(&answer) - 8)
                }
                cmd::QUERY => {
                    let body = abi::Query::from_prefix(self.body);
                    match body.option {
                        query::ADDR => {
                            let answer = manager.query_addr(system, channel, body.id)?;
                            self.answer(body.response, &answer, size_of_val(&answer) - 8)
                        }
                        query::GID => {
                            let answer = manager.query_gid(system, channel, body.id)?;
                            self.answer(body.response, &answer, size_of_val(&answer) - 8)
                        }
                        query::PATH => {
                            let answer = manager.query_path(channel, body.id)?;
                            self.answer(body.response, &answer, 8)
                        }
                        _ => Err(Errno(libc::ENOSYS)),
                    }
                }
                cmd::INIT_QP_ATTR => {
                    let body = abi::InitQpAttr::from_prefix(self.body);
                    let attr = manager.qp_attributes(system, channel, body.id, body.qp_state)?;
                    self.answer(body.response, &attr, size_of_val(&attr))
                }
                cmd::SET_OPTION => self.set_option(manager, channel),
                _ => self.run_without_answer(manager, system, channel),
            }
        }
    }

    fn run_without_answer(
        &self,
        manager: &mut Manager,
        system: &mut dyn System,
        channel: ChannelId,
    ) -> Result<()> {
        match self.header.cmd {
            cmd::BIND_IP => {
                let body = abi::BindIp::from_prefix(self.body);
                manager.bind(system, channel, body.id, Address::parse(&body.addr)?)
            }
            cmd::BIND => {
                let body = abi::Bind::from_prefix(self.body);
                let address = sized_address(&body.addr, body.addr_size)?.ok_or(EINVAL)?;
                manager.bind(system, channel, body.id, address)
            }
            cmd::RESOLVE_IP => {
                let body = abi::ResolveIp::from_prefix(self.body);
                let (src, dst) = (Address::parse_optional(&body.src)?, Address::parse(&body.dst)?);
                manager.resolve_addr(system, channel, body.id, src, dst)
            }
            cmd::RESOLVE_ADDR => {
                let body = abi::ResolveAddr::from_prefix(self.body);
                let src = sized_address(&body.src, body.src_size)?;
                let dst = sized_address(&body.dst, body.dst_size)?.ok_or(EINVAL)?;
                manager.resolve_addr(system, channel, body.id, src, dst)
            }
            cmd::RESOLVE_ROUTE => {
                let body = abi::ResolveRoute::from_prefix(self.body);
                manager.resolve_route(system, channel, body.id)
            }
            cmd::CONNECT => {
                let body = abi::Connect::from_prefix(self.body);
                if body.conn_param.valid == 0 {
                    return Err(EINVAL);
                }
                manager.connect(system, channel, body.id, &body.conn_param, body.ece)
            }
            cmd::LISTEN => {
                let body = abi::Listen::from_prefix(self.body);
                manager.listen(system, channel, body.id, body.backlog)
            }
            cmd::ACCEPT => {
                let body = abi::Accept::from_prefix(self.body);
                let param = (body.conn_param.valid != 0).then_some((&body.conn_param, body.ece));
                manager.accept(system, channel, body.id, body.uid, param)
            }
            cmd::REJECT => {
                let body = abi::Reject::from_prefix(self.body);
                let private = &body.private_data[..usize::from(body.private_data_len).min(MAX_PRIVATE)];
                manager.reject(system, channel, body.id, body.reason, private)
            }
            cmd::DISCONNECT => {
                let body = abi::Disconnect::from_prefix(self.body);
                manager.disconnect(system, channel, body.id)
            }
            cmd::NOTIFY => {
                let body = abi::Notify::from_prefix(self.body);
                manager.notify(system, channel, body.id, body.event)
            }
            _ => Err(Errno(libc::ENOSYS)),
        }
    }

    /// # Safety
    /// The option's address is readable for as many bytes as the command says.
    unsafe fn set_option(&self, manager: &mut Manager, channel: ChannelId) -> Result<()> {
        let body = abi::SetOption::from_prefix(self.body);
        // Only programs that queried a subnet manager set paths; Ethernet has none.
        if body.level != OPTION_ID {
            return Err(Errno(libc::ENOSYS));
        }
        let width = match body.optname {
            OPTION_ID_TOS | OPTION_ID_ACK_TIMEOUT => 1,
            OPTION_ID_REUSEADDR | OPTION_ID_AFONLY => 4,
            _ => return Err(Errno(libc::ENOSYS)),
        };
        if body.optlen != width || body.optval == 0 {
            return Err(EINVAL);
        }
        let mut value = [0; 4];
        // SAFETY: the caller vouches for the address; `width` is at most four.
        unsafe { user_memory::read(body.optval, &mut value[..width as usize])? };
        let flag = u32::from_ne_bytes(value) != 0;
        match body.optname {
            OPTION_ID_TOS => manager.set_tos(channel, body.id, value[0]),
            OPTION_ID_REUSEADDR => manager.set_reuse(channel, body.id, flag),
            OPTION_ID_AFONLY => manager.set_v6only(channel, body.id, flag),
            _ => manager.set_ack_timeout(channel, body.id, value[0]),
        }
    }
}

/// An answer of one number.
#[repr(transparent)]
#[derive(Clone, Copy)]
struct Number(u32);

// SAFETY: an integer.
unsafe impl Plain for Number {}

fn sized_address(bytes: &[u8; 128], size: u16) -> Result<Option<Address>> {
    let mut short = [0; LEN];
    short.copy_from_slice(&bytes[..LEN]);
    if size == 0 { Ok(None) } else { Address::parse(&short).map(Some) }
}
