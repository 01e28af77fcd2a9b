//! Which devices this node has.

use crate::args::{DeviceArg, DevicesArgs};
use crate::error::CliError;
use crate::logs;
use crate::output::say;
use crate::signals::Signals;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tracing::debug;
use weightd_core::content::DeviceUuid;
use weightd_gpu::Device;
use weightd_gpu::cuda::CudaError;

/// What `weightd devices` exits with where there is no CUDA device.
const NO_DEVICE: i32 = 3;
/// How long the driver may take to start: seconds with many devices that nothing has used yet.
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Who loads the CUDA driver to find its devices.
#[derive(Clone, Copy, Debug)]
pub enum Finder<'a> {
    /// This process, which uses them, or ends soon.
    Ourselves,
    /// A short-lived child, unless a signal comes: a launcher holds memory for months and needs no driver for that.
    Child(&'a Signals),
}

/// Why no devices were found.
enum NotFound {
    /// There are none.
    None(String),
    /// Whether there are some is unknown.
    Unknown(CliError),
}

/// The devices of a node.
#[derive(Clone, Debug)]
pub enum Devices {
    /// As many as one asks for.
    Host,
    /// By ordinal.
    Cuda(Vec<Device>),
}

impl Devices {
    /// The devices of the wanted kind. `auto` takes host memory where there is no CUDA device, and not where one does not
    /// work: engines that use it would look for its daemons.
    pub fn find(wanted: DeviceArg, finder: Finder<'_>) -> Result<Devices, CliError> {
        if wanted == DeviceArg::Cpu {
            return Ok(Devices::Host);
        }
        let found = match finder {
            Finder::Ourselves => Device::cuda().map_err(NotFound::from),
            Finder::Child(signals) => ask_child(signals),
        };
        match (found, wanted) {
            (Ok(devices), _) => Ok(Devices::Cuda(devices)),
            (Err(NotFound::None(why)), DeviceArg::Auto) => {
                debug!("no CUDA device, so host memory: {why}");
                Ok(Devices::Host)
            }
            (Err(NotFound::None(why)), _) => Err(CliError::Failure(why)),
            (Err(NotFound::Unknown(CliError::Failure(why))), DeviceArg::Auto) => {
                Err(CliError::Failure(format!(
                    "whether there are CUDA devices is not known: {why}; or choose host memory with --device cpu"
                )))
            }
            (Err(NotFound::Unknown(error)), _) => Err(error),
        }
    }

    /// How many there are; `None` for as many as one asks for.
    pub fn count(&self) -> Option<u32> {
        match self {
            Devices::Host => None,
            Devices::Cuda(devices) => Some(devices.len() as u32),
        }
    }

    /// The device with this number, which a placement has checked.
    pub fn get(&self, ordinal: u32) -> Device {
        match self {
            Devices::Host => Device::host(ordinal),
            Devices::Cuda(devices) => devices[ordinal as usize],
        }
    }
}

impl From<CudaError> for NotFound {
    fn from(error: CudaError) -> NotFound {
        match error {
            CudaError::NoDriver | CudaError::NoDevice => NotFound::None(error.to_string()),
            error => NotFound::Unknown(CliError::failure(error)),
        }
    }
}

/// `weightd devices`: the UUIDs of the CUDA devices, one on each line. Exits with [`NO_DEVICE`] where there are none.
pub fn run(_: &DevicesArgs) -> Result<ExitCode, CliError> {
    match Device::cuda().map_err(NotFound::from) {
        Ok(devices) => {
            for device in devices {
                say(device.uuid().hex())?;
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(NotFound::None(why)) => {
            logs::fail(&CliError::Failure(why));
            Ok(ExitCode::from(NO_DEVICE as u8))
        }
        Err(NotFound::Unknown(error)) => Err(error),
    }
}

/// Asks `weightd devices`.
fn ask_child(signals: &Signals) -> Result<Vec<Device>, NotFound> {
    let unknown = |why: String| NotFound::Unknown(CliError::Failure(why));
    let child = Command::new("/proc/self/exe")
        .arg0("weightd devices")
        // Its error is read below.
        .args(["--log-format", "text", "devices"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let child = child.map_err(|error| unknown(format!("cannot look for CUDA devices: {error}")))?;
    let output = output(child, signals).map_err(NotFound::Unknown)?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        let error = error.trim().strip_prefix("weightd: ").unwrap_or(error.trim());
        return Err(match (error, output.status.code()) {
            ("", _) => unknown(format!("the search for CUDA devices failed ({})", output.status)),
            (why, Some(NO_DEVICE)) => NotFound::None(why.to_owned()),
            (why, _) => unknown(why.to_owned()),
        });
    }
    let uuids = String::from_utf8_lossy(&output.stdout);
    let device = |(ordinal, line): (u32, &str)| {
        let uuid: Option<DeviceUuid> = DeviceUuid::from_hex(line);
        let uuid = uuid.ok_or_else(|| unknown(format!("the search for CUDA devices answered {line:?}")))?;
        Ok(Device::cuda_with(ordinal, uuid))
    };
    (0..).zip(uuids.lines()).map(device).collect()
}

/// What a child says that says little, once it has ended. One that hangs in a driver, as on a device that is broken, is
/// left alone after a while, or at a signal.
fn output(mut child: Child, signals: &Signals) -> Result<Output, CliError> {
    let until = Instant::now() + ANSWERS_WITHIN;
    while child.try_wait().map_err(CliError::failure)?.is_none() {
        let signal = signals.check();
        if signal.is_err() || Instant::now() >= until {
            let _ = child.kill();
            signal?;
            return Err(CliError::Failure(format!(
                "the CUDA driver has not answered within {} s: check nvidia-smi and dmesg",
                ANSWERS_WITHIN.as_secs()
            )));
        }
        sleep(LOOK_EVERY);
    }
    child.wait_with_output().map_err(CliError::failure)
}
