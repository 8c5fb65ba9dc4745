//! State machine of run control: no I/O, no clock.
//!
//! ```text
//!            configure            prepare             units ready          start
//!   idle ──────────────► configured ─────► starting ───────────────► ready ─────► running ◄──────► paused
//!     ◄──────────────       ▲   ▲ │  start: goes on to running                      │    pause,     │
//!            reset          │   │ └──────────────────────────────────────►          │    resume     │
//!                     reset │   └── stopping ◄────────────── stop ──────────────────┴───────────────┘
//!                           │          │             (also from starting and ready)
//!                         error ◄──────┴── the run failed
//! ```
//!
//! A run that ends on its own goes back to `configured`. A command changes the state at once, except `start` of a ready
//! run, `pause` and `resume`: their states follow when the event manager confirms them.

use millstream_evb::process::launcher::RunCommand;
use serde::{Deserialize, Serialize};
use std::fmt;

/// State of run control.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// No configuration.
    #[default]
    Idle,
    /// The configuration is checked. No process runs.
    Configured,
    /// The processes of a run start.
    Starting,
    /// All units are connected; no event is assigned.
    Ready,
    /// Events are built.
    Running,
    /// No further event is assigned.
    Paused,
    /// The run ends.
    Stopping,
    /// The last run failed.
    Error,
}

impl State {
    /// All states.
    pub const ALL: [State; 8] = [
        State::Idle,
        State::Configured,
        State::Starting,
        State::Ready,
        State::Running,
        State::Paused,
        State::Stopping,
        State::Error,
    ];

    /// Whether the state changes without a command.
    pub fn is_transitional(self) -> bool {
        matches!(self, State::Starting | State::Stopping)
    }
}

/// A command of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// Read and check the configuration.
    Configure,
    /// Change settings of the configuration.
    Set,
    /// Start the processes, and no event.
    Prepare,
    /// Start a run.
    Start,
    /// Assign no further event.
    Pause,
    /// Assign events again.
    Resume,
    /// End the run.
    Stop,
    /// Acknowledge an error; drop the configuration.
    Reset,
}

impl Command {
    /// All commands.
    pub const ALL: [Command; 8] = [
        Command::Configure,
        Command::Set,
        Command::Prepare,
        Command::Start,
        Command::Pause,
        Command::Resume,
        Command::Stop,
        Command::Reset,
    ];

    /// The states in which the command is allowed.
    pub fn allowed_in(self) -> &'static [State] {
        match self {
            Command::Configure => &[State::Idle, State::Configured, State::Error],
            Command::Set | Command::Prepare => &[State::Configured],
            Command::Start => &[State::Configured, State::Ready],
            Command::Pause => &[State::Running],
            Command::Resume => &[State::Paused],
            Command::Stop => &[State::Starting, State::Ready, State::Running, State::Paused],
            Command::Reset => &[State::Configured, State::Error],
        }
    }
}

/// What happened to the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunInput {
    /// All units are ready.
    UnitsReady,
    /// The event manager paused (`true`) or resumed the run.
    Paused(bool),
    /// All processes of the run have ended.
    Ended {
        /// Whether the run failed. A run that was stopped has not failed.
        failed: bool,
    },
}

/// What the owner of the machine does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start the processes of a run. The run starts paused.
    Launch,
    /// Send a command to the run.
    Send(RunCommand),
}

/// A command that the present state does not allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{command} is not allowed while the state is {state}; allowed in: {}", list(.command.allowed_in()))]
pub struct NotAllowed {
    /// The command.
    pub command: Command,
    /// The state.
    pub state: State,
}

fn list(states: &[State]) -> String {
    states.iter().map(State::to_string).collect::<Vec<_>>().join(", ")
}

/// The state machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    state: State,
    /// The run goes on from `ready` by itself.
    starts: bool,
}

impl Machine {
    /// The state.
    pub fn state(&self) -> State {
        self.state
    }

    /// Whether the state allows a command.
    ///
    /// # Errors
    /// The command, the state, and the states that allow it.
    pub fn check(&self, command: Command) -> Result<(), NotAllowed> {
        if command.allowed_in().contains(&self.state) {
            return Ok(());
        }
        Err(NotAllowed { command, state: self.state })
    }

    /// Handles a command. The caller has checked a new configuration before.
    ///
    /// # Errors
    /// The state does not allow the command, and stays.
    pub fn handle_command(&mut self, command: Command) -> Result<Option<Action>, NotAllowed> {
        self.check(command)?;
        let was = self.state;
        let action = match command {
            Command::Configure | Command::Set => {
                self.state = State::Configured;
                return Ok(None);
            }
            Command::Reset => {
                self.state = if was == State::Error { State::Configured } else { State::Idle };
                return Ok(None);
            }
            Command::Start if was == State::Ready => Action::Send(RunCommand::Resume),
            Command::Prepare | Command::Start => {
                self.state = State::Starting;
                self.starts = command == Command::Start;
                Action::Launch
            }
            Command::Pause => Action::Send(RunCommand::Pause),
            Command::Resume => Action::Send(RunCommand::Resume),
            Command::Stop => {
                self.state = State::Stopping;
                Action::Send(RunCommand::Stop)
            }
        };
        Ok(Some(action))
    }

    /// Handles what happened to the run. Inputs that do not fit the state are late and have no effect.
    pub fn handle_run(&mut self, input: RunInput) -> Option<Action> {
        match (self.state, input) {
            (State::Idle | State::Configured | State::Error, _) => {}
            (_, RunInput::Ended { failed }) => {
                self.state = if failed { State::Error } else { State::Configured };
            }
            (State::Starting, RunInput::UnitsReady) => {
                self.state = State::Ready;
                return self.starts.then_some(Action::Send(RunCommand::Resume));
            }
            (State::Ready | State::Paused, RunInput::Paused(false)) => self.state = State::Running,
            (State::Running, RunInput::Paused(true)) => self.state = State::Paused,
            _ => {}
        }
        None
    }
}

/// The name in JSON.
fn name(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        _ => String::new(),
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name(self))
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn after(commands: &[Command], inputs: &[RunInput]) -> Machine {
        let mut machine = Machine::default();
        commands.iter().for_each(|command| _ = machine.handle_command(*command).unwrap());
        inputs.iter().for_each(|input| _ = machine.handle_run(*input));
        machine
    }

    #[test]
    fn a_run_goes_through_all_states() {
        let mut machine = after(&[Command::Configure], &[]);
        assert_eq!(machine.handle_command(Command::Prepare), Ok(Some(Action::Launch)));
        assert_eq!(machine.state(), State::Starting);
        assert_eq!(machine.handle_run(RunInput::UnitsReady), None);
        assert_eq!(machine.state(), State::Ready);
        assert_eq!(machine.handle_command(Command::Start), Ok(Some(Action::Send(RunCommand::Resume))));
        assert_eq!(machine.state(), State::Ready);
        machine.handle_run(RunInput::Paused(false));
        assert_eq!(machine.state(), State::Running);
        assert_eq!(machine.handle_command(Command::Pause), Ok(Some(Action::Send(RunCommand::Pause))));
        machine.handle_run(RunInput::Paused(true));
        assert_eq!(machine.state(), State::Paused);
        assert_eq!(machine.handle_command(Command::Stop), Ok(Some(Action::Send(RunCommand::Stop))));
        assert_eq!(machine.state(), State::Stopping);
        machine.handle_run(RunInput::Ended { failed: false });
        assert_eq!(machine.state(), State::Configured);
    }

    #[test]
    fn start_goes_on_from_ready_by_itself_and_prepare_does_not() {
        let mut started = after(&[Command::Configure, Command::Start], &[]);
        assert_eq!(started.handle_run(RunInput::UnitsReady), Some(Action::Send(RunCommand::Resume)));
        let mut prepared = after(&[Command::Configure, Command::Prepare], &[]);
        assert_eq!(prepared.handle_run(RunInput::UnitsReady), None);
        // The flag of an earlier run has no effect.
        started.handle_run(RunInput::Ended { failed: false });
        started.handle_command(Command::Prepare).unwrap();
        assert_eq!(started.handle_run(RunInput::UnitsReady), None);
    }

    #[test]
    fn a_failed_run_needs_a_reset_or_a_new_configuration() {
        let failed = after(&[Command::Configure, Command::Start], &[RunInput::Ended { failed: true }]);
        assert_eq!(failed.state(), State::Error);
        let mut machine = failed;
        let refused = machine.handle_command(Command::Start).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "start is not allowed while the state is error; allowed in: configured, ready"
        );
        machine.handle_command(Command::Reset).unwrap();
        assert_eq!(machine.state(), State::Configured);
        machine.handle_command(Command::Reset).unwrap();
        assert_eq!(machine.state(), State::Idle);
        let mut machine = failed;
        machine.handle_command(Command::Configure).unwrap();
        assert_eq!(machine.state(), State::Configured);
    }

    #[test]
    fn late_confirmations_do_not_undo_a_stop() {
        let mut machine =
            after(&[Command::Configure, Command::Start], &[RunInput::UnitsReady, RunInput::Paused(false)]);
        machine.handle_command(Command::Stop).unwrap();
        machine.handle_run(RunInput::Paused(true));
        assert_eq!(machine.state(), State::Stopping);
    }

    fn step() -> impl Strategy<Value = Result<Command, RunInput>> {
        prop_oneof![
            (0..Command::ALL.len()).prop_map(|k| Ok(Command::ALL[k])),
            Just(Err(RunInput::UnitsReady)),
            any::<bool>().prop_map(|paused| Err(RunInput::Paused(paused))),
            any::<bool>().prop_map(|failed| Err(RunInput::Ended { failed })),
        ]
    }

    proptest! {
        /// A run is launched only while none exists, gets commands only while it exists, and ends once.
        #[test]
        fn actions_fit_the_run(steps in prop::collection::vec(step(), 0..64)) {
            let mut machine = Machine::default();
            let mut exists = false;
            for step in steps {
                let before = machine;
                let action = match step {
                    Ok(command) => {
                        let allowed = machine.check(command).is_ok();
                        let result = machine.handle_command(command);
                        prop_assert_eq!(result.is_ok(), allowed);
                        if !allowed {
                            prop_assert_eq!(machine, before);
                        }
                        result.unwrap_or(None)
                    }
                    Err(input) => {
                        exists &= !matches!(input, RunInput::Ended { .. });
                        machine.handle_run(input)
                    }
                };
                match action {
                    Some(Action::Launch) => {
                        prop_assert!(!exists);
                        exists = true;
                    }
                    Some(Action::Send(_)) => prop_assert!(exists),
                    None => {}
                }
                let idle = matches!(machine.state(), State::Idle | State::Configured | State::Error);
                prop_assert_eq!(exists, !idle);
            }
        }
    }
}
