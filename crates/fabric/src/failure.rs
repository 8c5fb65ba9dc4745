//! Failure of operations in which all nodes take part.

use crate::FabricError;

/// The first error of operations in which all nodes take part. Other nodes may have counted what this node gave to the
/// operation that failed, so a later one would mix their data: it fails with the same error.
#[derive(Clone, Copy, Debug, Default)]
pub struct FirstError(Option<FabricError>);

impl FirstError {
    /// Begins an operation.
    ///
    /// # Errors
    /// The error of an earlier one.
    pub fn check(&self) -> Result<(), FabricError> {
        self.0.map_or(Ok(()), Err)
    }

    /// Ends an operation.
    ///
    /// # Errors
    /// That of the result, which later operations have, too.
    pub fn keep<R>(&mut self, result: Result<R, FabricError>) -> Result<R, FabricError> {
        result.inspect_err(|&error| self.0 = Some(error))
    }
}
