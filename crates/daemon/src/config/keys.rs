//! Every key of the configuration, with its default and its meaning.

/// A key of the configuration.
pub struct Key {
    pub name: &'static str,
    /// As it stands in the file.
    pub default: &'static str,
    pub help: &'static str,
}

impl Key {
    /// `engine.runsc_path` is `TORPOR_ENGINE_RUNSC_PATH`.
    pub fn variable(&self) -> String {
        format!("TORPOR_{}", self.name.replace('.', "_").to_uppercase())
    }

    /// Whether its value is a text that nobody may see, also if it looks like a number.
    pub(super) fn is_secret(&self) -> bool {
        matches!(self.name, "api_key" | "secret_key")
    }
}

/// Every key there is.
pub const KEYS: &[Key] = &[
    Key {
        name: "listen",
        default: "\"127.0.0.1:8900\"",
        help: "Address and port of the API, previews and metrics. Anything but loopback needs an \
               API key.",
    },
    Key {
        name: "listen_also",
        default: "none",
        help: "A second address with the same answers, under the same rule; `off`: none. Default: \
               `127.0.0.1:9443` if `listen` is `127.0.0.1:8900` and nobody else uses it, because \
               Tensorlake's command line looks for sandboxes there.",
    },
    Key {
        name: "data_dir",
        default: "\"/var/lib/torpor\"",
        help: "Images, the ledger and the disks of sandboxes. One daemon at a time.",
    },
    Key {
        name: "runtime_dir",
        default: "\"/run/torpor\"",
        help: "Sockets and state of running machines; may be lost at a reboot.",
    },
    Key {
        name: "api_key",
        default: "none",
        help: "A key that is always valid, besides those made with `torpor key create`.",
    },
    Key {
        name: "require_key",
        default: "none",
        help: "`true`: every request needs a key. `false`: on loopback none is needed while there is \
               none. Default: a key is needed from the first one on, also when all are revoked.",
    },
    Key {
        name: "secret_key",
        default: "none",
        help: "What secrets are encrypted with: 32 bytes as 64 hexadecimal digits or base64. \
               Default: a key that is made and kept in the data directory.",
    },
    Key {
        name: "engine.kind",
        default: "\"auto\"",
        help: "`gvisor`, `microvm`, or `auto`: `microvm` where KVM works and QEMU and a kernel are \
               there, else `gvisor`.",
    },
    Key {
        name: "engine.others",
        default: "true",
        help: "Opens the other engines too that work here, for sandboxes that ask for one (`torpor create \
               --engine`). `engine.kind` is the default of all others.",
    },
    Key {
        name: "engine.runsc_path",
        default: "none",
        help: "The runsc program. Default: the first one in PATH.",
    },
    Key {
        name: "engine.qemu_path",
        default: "none",
        help: "The QEMU program, 10.0 or newer. Default: the first one in PATH.",
    },
    Key {
        name: "engine.first_user",
        default: "1953497088",
        help: "Every sandbox has a user of the host of its own: this number or one of the 65535 after \
               it. Nobody else may have them; not below 65536.",
    },
    Key {
        name: "engine.emulate",
        default: "false",
        help: "Lets `microvm` emulate the processor where KVM does not work. Many times slower: for \
               tests.",
    },
    Key {
        name: "defaults.cpus",
        default: "1.0",
        help: "Processor cores of a sandbox that does not say.",
    },
    Key {
        name: "defaults.memory_mib",
        default: "1024",
        help: "Memory of a sandbox that does not say.",
    },
    Key {
        name: "defaults.disk_mib",
        default: "10240",
        help: "What a sandbox may write that does not say.",
    },
    Key {
        name: "defaults.pids",
        default: "4096",
        help: "Host tasks of a sandbox that does not say; not less than 4096.",
    },
    Key {
        name: "limits.sandboxes",
        default: "10000",
        help: "Sandboxes that run or sleep in memory; for more, sleeping ones leave it, or they are \
               refused.",
    },
    Key {
        name: "limits.connections",
        default: "10000",
        help: "Connections at the same time; more wait to be accepted.",
    },
    Key {
        name: "limits.tasks",
        default: "0",
        help: "Tasks of jobs that run on this host at the same time; the others wait. 0: eight per \
               processor core.",
    },
    Key {
        name: "limits.results_mib",
        default: "10240",
        help: "What the files that tasks of jobs left may take on disk. Beyond it, those of the execution that \
               ended first go.",
    },
    Key {
        name: "limits.requests_per_sec",
        default: "0",
        help: "Requests to the API that each key may make in a second, after a burst of twice as many. \
               0: any number.",
    },
    Key {
        name: "standby.idle_after_ms",
        default: "15000",
        help: "A sandbox that does not say falls asleep when nobody talked to it for so long, \
               or `\"never\"` by itself.",
    },
    Key {
        name: "standby.persist_after_ms",
        default: "30000",
        help: "So long after it fell asleep a sandbox is saved to disk, if nobody woke it.",
    },
    Key {
        name: "standby.warm_for_secs",
        default: "3600",
        help: "So long a sleeping sandbox stays in memory, too.",
    },
    Key {
        name: "standby.memory_floor_mib",
        default: "0",
        help: "Below so much free memory, sleeping sandboxes leave it, the least used first. 0: a \
               tenth of the host's memory.",
    },
    Key {
        name: "standby.pressure_percent",
        default: "20",
        help: "The same when processes waited for memory for so much of the last ten seconds \
               (`some avg10` of /proc/pressure/memory). 0: not looked at.",
    },
    Key {
        name: "standby.idle_awake_max",
        default: "0",
        help: "How many sandboxes may be awake without being used. Above it, those unused longest \
               fall asleep before their `idle_after`. 0: eight per processor core.",
    },
    Key {
        name: "standby.shells",
        default: "2",
        help: "Empty machines that are prepared ahead, so that a sandbox starts or wakes sooner.",
    },
    Key {
        name: "builds.cache_mib",
        default: "20480",
        help: "What steps of image builds that need not be done again may take on disk, and so much \
               again the directories of `RUN --mount=type=cache`. What was not used for longest goes. \
               `0`: nothing is kept.",
    },
    Key {
        name: "egress.private",
        default: "[]",
        help: "Private addresses, such as `[\"10.1.0.0/16\"]`, that the policy of a sandbox may open by \
               naming them. All others are reached by no sandbox.",
    },
    Key {
        name: "egress.outgoing",
        default: "[]",
        help: "Private addresses, such as `[\"127.0.0.1/32\"]`, that the daemon itself may send requests to \
               for whoever has a key: webhooks and callbacks. All others are refused.",
    },
    Key {
        name: "mcp_gateway.open",
        default: "false",
        help: "Whether API keys without a policy of their own may call every approved tool of the MCP gateway. \
               Otherwise they see none.",
    },
    Key {
        name: "egress.roots",
        default: "none",
        help: "A file of CA certificates (PEM) that are trusted besides those of the host, when requests \
               are intercepted, and for requests of the daemon itself, such as webhooks.",
    },
    Key {
        name: "egress.resolver",
        default: "none",
        help: "Address and port of the name server for sandboxes whose policy has names. Default: the \
               one of the host.",
    },
    Key {
        name: "egress.gateways",
        default: "{}",
        help: "Ways out that a policy can choose by name: `office = \"source 203.0.113.9\"`, \
               `\"http://user:password@proxy:3128\"` or `\"socks5://proxy:1080\"`.",
    },
    Key {
        name: "guest.extra_ca",
        default: "[]",
        help: "Files of CA certificates (PEM) that every sandbox and image build trusts, such as \
               `[\"/etc/ssl/office.pem\"]` on a network whose TLS is inspected; intercepted requests \
               trust them, too.",
    },
    Key {
        name: "guest.env",
        default: "{}",
        help: "Variables that every process in a sandbox gets, unless its image or the sandbox says \
               otherwise.",
    },
    Key {
        name: "guest.images",
        default: "{}",
        help: "More of both for sandboxes of one image: `[guest.images.\"team/web:2\"]` with `extra_ca` \
               and `env`.",
    },
    Key {
        name: "images.pull",
        default: "\"missing\"",
        help: "When an image is pulled from its registry for a request that does not say: `missing`, \
               `always` or `never`.",
    },
    Key {
        name: "images.docker_config",
        default: "none",
        help: "What `docker login` writes, with logins and helpers for registries. Default: \
               `config.json` in `$DOCKER_CONFIG`, or in `.docker` of the daemon's home.",
    },
    Key {
        name: "registries",
        default: "{}",
        help: "About one registry: `[registries.\"docker.io\"]` with `mirrors` (hosts or URLs that are \
               asked before it), `plain_http` (without TLS; default: only a registry on this host) and \
               `ca_file` (certificates that are believed for it).",
    },
    Key {
        name: "previews.domain",
        default: "\"localhost\"",
        help: "Previews are found below this name, all names below which must lead to this host.",
    },
    Key {
        name: "tls.listen",
        default: "none",
        help: "Where encrypted connections come in, such as `0.0.0.0:443`.",
    },
    Key { name: "tls.certificate", default: "none", help: "A certificate with its chain (PEM)." },
    Key { name: "tls.key", default: "none", help: "The key of `tls.certificate` (PEM)." },
    Key {
        name: "tls.names",
        default: "[]",
        help: "Names of this daemon itself, such as `[\"torpor.example.org\"]`, that it gets \
               certificates for.",
    },
    Key {
        name: "tls.acme_directory",
        default: "none",
        help: "Who gives certificates for names without one: `letsencrypt`, `letsencrypt-staging`, or \
               the address of another directory (RFC 8555).",
    },
    Key {
        name: "tls.acme_email",
        default: "none",
        help: "Whom that directory writes to when something is wrong.",
    },
    Key {
        name: "tls.acme_roots",
        default: "none",
        help: "A file of certificates (PEM) that the directory itself is believed with, besides those \
               of the host.",
    },
    Key {
        name: "tls.acme_challenge",
        default: "\"tls-alpn-01\"",
        help: "How the directory sees that a name leads here: `tls-alpn-01`, at port 443, or `http-01`, \
               at port 80, either of which must lead to this daemon.",
    },
    Key {
        name: "tls.acme_dns_hook",
        default: "none",
        help: "A program that is called as `HOOK present|cleanup NAME VALUE` to set and remove TXT \
               records. With it, one certificate does for all names below `previews.domain`.",
    },
    Key { name: "log.format", default: "\"text\"", help: "`text` or `json`." },
    Key {
        name: "log.level",
        default: "\"info\"",
        help: "`error`, `warn`, `info`, `debug`, `trace`, or a filter such as \
               `info,torpor_engines=debug`.",
    },
];
