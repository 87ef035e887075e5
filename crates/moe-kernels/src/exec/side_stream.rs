//! Runs two pieces of work at the same time, the first of them on a second stream of a CUDA device.

use candle_core::Result;

use super::Exec;

impl Exec {
    /// Runs `side` and `main`, which do not depend on each other. Later work waits for both. On a CUDA device
    /// `side` runs on a second stream, in a context without marks and padding; otherwise one runs after the other.
    /// The data that `side` uses stays borrowed until this function returns.
    ///
    /// # Errors
    /// The errors of `side` and `main`.
    pub fn overlap(
        &mut self,
        side: impl FnOnce(&mut Exec) -> Result<()>,
        main: impl FnOnce(&mut Exec) -> Result<()>,
    ) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(cuda) = self.cuda.clone() {
            let stream = cuda.side()?;
            let mut second = Self {
                workspace: self.side_workspace.clone(),
                batch_invariant: self.batch_invariant,
                launches: self.launches.clone(),
                ..Self::on(&stream.device)?
            };
            stream.fork(&cuda.stream)?;
            let ends = [side(&mut second), main(self)];
            // The streams are joined even after an error, because a capture with a fork must end joined.
            stream.join(&cuda.stream)?;
            return ends.into_iter().collect();
        }
        side(self)?;
        main(self)
    }
}
