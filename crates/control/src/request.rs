//! What operators give with their commands.

use crate::error::ControlError;

/// Limits of operators' texts, in bytes.
const MAX_OPERATOR: usize = 100;
const MAX_COMMENT: usize = 2000;

/// What an operator gives with a command.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// Who gives it.
    pub operator: String,
    /// A comment for the log book.
    pub comment: String,
}

impl Request {
    pub(crate) fn check(&self) -> Result<(), ControlError> {
        check_text("operator", &self.operator, MAX_OPERATOR)?;
        check_text("comment", &self.comment, MAX_COMMENT)
    }
}

fn check_text(field: &'static str, text: &str, limit: usize) -> Result<(), ControlError> {
    if text.len() > limit {
        let problem = format!("has {} bytes; at most {limit} are allowed", text.len());
        return Err(ControlError::Text { field, problem });
    }
    match text.chars().find(|c| c.is_control() && *c != '\n') {
        Some(odd) => {
            Err(ControlError::Text { field, problem: format!("holds the control character {odd:?}") })
        }
        None => Ok(()),
    }
}
