//! Loader, publisher and server for async engines, on any runtime.
//!
//! A [`Runtime`] waits, runs what blocks elsewhere, and spawns; the rest is here, once for all of them.
//! `weightd-tokio` and `weightd-smol` are such runtimes.
//!
//! Every future may be dropped at any moment: its connection closes and its descriptors with it. What runs
//! where it may block (also what the engine builds, loads or fills) then runs to its end there, and what came of
//! it is dropped there. A publication that was on its way may have been stored.

mod driven;
mod loader;
mod publisher;

pub use loader::Loader;
pub use publisher::Publisher;

use crate::serve::{ServerProcess, Serving};
use driven::Driven;
use std::future::Future;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;
use weightd_core::machine::{Server, ServerEvent};

/// What an async runtime does for weightd.
pub trait Runtime: 'static {
    /// A descriptor that is waited for.
    type Waiting: Send + Sync;

    /// What ends a spawned future when it is dropped.
    type Spawned: Send + Sync + 'static;

    /// Begins to wait for a descriptor to be readable. It is never read from here.
    ///
    /// # Errors
    /// The runtime cannot wait for it.
    fn register(descriptor: OwnedFd) -> io::Result<Self::Waiting>;

    /// Until the descriptor has become readable since this was called last, or the time is over. It may
    /// return early.
    ///
    /// # Errors
    /// The runtime cannot wait for it.
    fn readable(
        waiting: &Self::Waiting,
        timeout: Option<Duration>,
    ) -> impl Future<Output = io::Result<()>> + Send;

    /// Lets others have their turn.
    fn yield_now() -> impl Future<Output = ()> + Send;

    /// Runs what blocks where that may be. Where the future is dropped, it runs to its end. Its panic is this
    /// future's.
    ///
    /// # Errors
    /// It was not run, since the runtime ends.
    fn unblock<T: Send + 'static>(
        work: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = io::Result<T>> + Send;

    /// Runs what blocks where that may be, and does not wait for it.
    fn detach(work: impl FnOnce() + Send + 'static);

    /// Runs a future in the background, until what is returned is dropped.
    fn spawn(future: impl Future<Output = ()> + Send + 'static) -> Self::Spawned;
}

/// Serves as [`serve`](crate::serve::serve) does, until that ends.
///
/// # Errors
/// This process has no usable user, or cannot wait.
pub async fn serve<R: Runtime>(
    process: ServerProcess<'_>,
    signals: impl AsFd,
    on_event: impl FnMut(&Server<OwnedFd>, &ServerEvent) + Send + 'static,
) -> io::Result<()> {
    let serving = Serving::new(process, signals, on_event)?;
    Driven::<R, _>::new(serving)?.run().await
}
