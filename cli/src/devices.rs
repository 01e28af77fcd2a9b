//! Which devices this node has.

use crate::args::{DeviceArg, DevicesArgs};
use crate::error::CliError;
use crate::output::say;
use std::process::{Command, ExitCode, Stdio};
use tracing::debug;
use weightd_core::content::DeviceUuid;
use weightd_gpu::Device;
use weightd_gpu::cuda::CudaError;

/// Who loads the CUDA driver to find its devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finder {
    /// This process, which uses them, or ends soon.
    Ourselves,
    /// A short-lived child: a launcher holds memory for months and needs no driver for that.
    Child,
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
    /// The devices of the wanted kind; `auto` takes CUDA where a device is found.
    pub fn find(wanted: DeviceArg, finder: Finder) -> Result<Devices, CliError> {
        if wanted == DeviceArg::Cpu {
            return Ok(Devices::Host);
        }
        let found = match finder {
            Finder::Ourselves => Device::cuda().map_err(|error| error.to_string()),
            Finder::Child => ask_child(),
        };
        match (found, wanted) {
            (Ok(devices), _) => Ok(Devices::Cuda(devices)),
            (Err(why), DeviceArg::Auto) => {
                debug!("no CUDA device, so host memory: {why}");
                Ok(Devices::Host)
            }
            (Err(why), _) => Err(CliError::Failure(why)),
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

/// `weightd devices`: the UUIDs of the CUDA devices, one on each line.
pub fn run(_: &DevicesArgs) -> Result<ExitCode, CliError> {
    for device in Device::cuda().map_err(|error: CudaError| CliError::failure(error))? {
        say(device.uuid().hex())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn ask_child() -> Result<Vec<Device>, String> {
    let output = Command::new("/proc/self/exe")
        // Its error is read below.
        .args(["--log-format", "text", "devices"])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cannot ask for CUDA devices: {error}"))?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        let error = error.trim().strip_prefix("weightd: ").unwrap_or(error.trim());
        return Err(match error {
            "" => format!("the search for CUDA devices failed ({})", output.status),
            error => error.to_owned(),
        });
    }
    let uuids = String::from_utf8_lossy(&output.stdout);
    let device = |(ordinal, line): (u32, &str)| {
        let uuid: Option<DeviceUuid> = DeviceUuid::from_hex(line);
        let uuid = uuid.ok_or_else(|| format!("the search for CUDA devices answered {line:?}"))?;
        Ok(Device::cuda_with(ordinal, uuid))
    };
    (0..).zip(uuids.lines()).map(device).collect()
}
