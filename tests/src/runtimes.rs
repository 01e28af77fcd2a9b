//! The runtimes, each as a client and as a server, so that one suite can run them all.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weightd_blocking::asynchronous::{self, Runtime};
use weightd_blocking::serve::{ServerProcess, serve};
use weightd_blocking::{Binding, Contents, Filling, LoadError, Loaded, PublishFailed, Published};
use weightd_core::content::Generation;
use weightd_core::machine::AttachError;
use weightd_gpu::{Device, Weights};
use weightd_smol::Smol;
use weightd_tokio::Tokio;

/// An engine's model: the cache's weights, or none, where it loaded them itself.
pub type Model = Option<Arc<Mutex<Weights>>>;

/// Makes a model of the cache's weights.
pub type Build = Box<dyn FnOnce(Weights) -> Result<Model, String> + Send>;

/// Loads a model from disk.
pub type FromDisk = Box<dyn FnOnce(&AttachError) -> Result<Model, String> + Send>;

/// Fills the memory of a publication.
pub type Fill = Box<dyn FnOnce(&Filling) -> Result<(), String> + Send>;

/// What engines and launchers do on a runtime. What it starts ends when this is dropped.
#[allow(missing_docs)]
pub trait Subject: Send + Sync + 'static {
    fn start() -> Self;

    fn load(&self, binding: Binding, build: Build, disk: FromDisk) -> Result<Loaded<Model>, LoadError>;

    fn reload(
        &self,
        binding: Binding,
        current: Option<Generation>,
        build: Build,
    ) -> Result<Option<Loaded<Model>>, LoadError>;

    fn external_memory(&self, binding: Binding) -> Result<u64, LoadError>;

    fn publish(
        &self,
        binding: Binding,
        device: Device,
        contents: Contents,
        fill: Fill,
    ) -> Result<Published, PublishFailed>;

    fn serve(process: ServerProcess<'_>, signals: OwnedFd) -> io::Result<()>;
}

/// `weightd-blocking`.
#[derive(Debug)]
pub struct Blocking;

impl Subject for Blocking {
    fn start() -> Blocking {
        Blocking
    }

    fn load(&self, binding: Binding, build: Build, disk: FromDisk) -> Result<Loaded<Model>, LoadError> {
        weightd_blocking::Loader::from(binding).load(build, disk)
    }

    fn reload(
        &self,
        binding: Binding,
        current: Option<Generation>,
        build: Build,
    ) -> Result<Option<Loaded<Model>>, LoadError> {
        weightd_blocking::Loader::from(binding).reload(current, build)
    }

    fn external_memory(&self, binding: Binding) -> Result<u64, LoadError> {
        weightd_blocking::Loader::from(binding).external_memory()
    }

    fn publish(
        &self,
        binding: Binding,
        device: Device,
        contents: Contents,
        fill: Fill,
    ) -> Result<Published, PublishFailed> {
        weightd_blocking::Publisher::with(binding, device).publish(contents, fill)
    }

    fn serve(process: ServerProcess<'_>, signals: OwnedFd) -> io::Result<()> {
        serve(process, signals, |_, _| {})
    }
}

/// Something that runs the futures of an async runtime.
#[allow(missing_docs)]
pub trait Executor: Send + Sync + 'static {
    type Runtime: Runtime;

    fn start() -> Self;

    /// What was spawned before goes on meanwhile, and after.
    fn block_on<F: Future>(&self, future: F) -> F::Output;
}

impl<E: Executor> Subject for E {
    fn start() -> E {
        Executor::start()
    }

    fn load(&self, binding: Binding, build: Build, disk: FromDisk) -> Result<Loaded<Model>, LoadError> {
        let loader = asynchronous::Loader::<E::Runtime>::from(binding);
        self.block_on(loader.load(build, disk))
    }

    fn reload(
        &self,
        binding: Binding,
        current: Option<Generation>,
        build: Build,
    ) -> Result<Option<Loaded<Model>>, LoadError> {
        let loader = asynchronous::Loader::<E::Runtime>::from(binding);
        self.block_on(loader.reload(current, build))
    }

    fn external_memory(&self, binding: Binding) -> Result<u64, LoadError> {
        let loader = asynchronous::Loader::<E::Runtime>::from(binding);
        self.block_on(loader.external_memory())
    }

    fn publish(
        &self,
        binding: Binding,
        device: Device,
        contents: Contents,
        fill: Fill,
    ) -> Result<Published, PublishFailed> {
        let publisher = asynchronous::Publisher::<E::Runtime>::with(binding, device);
        self.block_on(publisher.publish(contents, fill))
    }

    fn serve(process: ServerProcess<'_>, signals: OwnedFd) -> io::Result<()> {
        let executor = <E as Executor>::start();
        executor.block_on(asynchronous::serve::<E::Runtime>(process, signals, |_, _| {}))
    }
}

/// `weightd-tokio`, with a thread of its own for what goes on in the background.
pub type OnTokio = TokioRuntime<true>;

/// `weightd-tokio`, with everything in the one thread that waits.
pub type OnOneThread = TokioRuntime<false>;

/// A runtime of tokio's: what is spawned runs in the background, or while somebody waits.
#[derive(Debug)]
pub struct TokioRuntime<const BACKGROUND: bool>(tokio::runtime::Runtime);

impl<const BACKGROUND: bool> Executor for TokioRuntime<BACKGROUND> {
    type Runtime = Tokio;

    fn start() -> Self {
        let mut builder = match BACKGROUND {
            true => tokio::runtime::Builder::new_multi_thread(),
            false => tokio::runtime::Builder::new_current_thread(),
        };
        builder
            .worker_threads(1)
            .thread_keep_alive(Duration::from_millis(100));
        TokioRuntime(builder.enable_all().build().expect("a runtime"))
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.0.block_on(future)
    }
}

/// `weightd-smol`.
#[derive(Debug)]
pub struct OnSmol;

impl Executor for OnSmol {
    type Runtime = Smol;

    fn start() -> OnSmol {
        OnSmol
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        smol::block_on(future)
    }
}
