//! Routes as they are written on the command line and in files.

use std::io::Read;
use std::str::FromStr;

use torpor_protocol::{HostPattern, Route};

/// Bytes of a file with routes; the daemon takes a policy of a sixteenth of it.
const FILE_MAX: u64 = 256 * 1024;

/// How a route is written, for whoever wrote it otherwise.
const FORM: &str = "it is written 'HOST,HOST: HEADER=VALUE'";

/// Understands `api.example.com,*.example.org: Authorization=Bearer {{SECRET:TOKEN}}`.
pub(super) fn parse(text: &str) -> Result<Route, String> {
    let (hosts, put) = text.split_once(':').ok_or(FORM)?;
    let (name, value) = put.split_once('=').ok_or(FORM)?;
    let (name, value) = (name.trim(), value.trim());
    if name.is_empty() || value.is_empty() {
        return Err(FORM.to_owned());
    }
    let host = |text: &str| text.trim().parse::<HostPattern>().map_err(|error| error.to_string());
    Ok(Route {
        hosts: hosts.split(',').map(host).collect::<Result<_, _>>()?,
        headers: [(name.to_owned(), value.to_owned())].into(),
        ..Route::default()
    })
}

/// The routes in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RouteFile(Vec<Route>);

pub(super) fn read(path: &str) -> Result<RouteFile, String> {
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    let read = file.take(FILE_MAX + 1).read_to_string(&mut text);
    if read.map_err(|error| error.to_string())? as u64 > FILE_MAX {
        return Err(format!("it has more than {FILE_MAX} bytes"));
    }
    text.parse()
}

impl FromStr for RouteFile {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let routes = match text.trim_start().starts_with('[') {
            true => serde_json::from_str(text),
            false => serde_json::from_str(text).map(|route| vec![route]),
        };
        routes.map(Self).map_err(|error| error.to_string())
    }
}

/// All routes; what is put into requests to the same hosts is one.
pub(super) fn merged(given: Vec<Route>, files: Vec<RouteFile>) -> Vec<Route> {
    let mut routes: Vec<Route> = Vec::new();
    for route in given {
        match routes.iter_mut().find(|other| other.hosts == route.hosts) {
            Some(other) => other.headers.extend(route.headers),
            None => routes.push(route),
        }
    }
    routes.extend(files.into_iter().flat_map(|RouteFile(routes)| routes));
    routes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_is_hosts_and_a_header() {
        let route =
            parse("api.example.com, *.example.org: Authorization=Bearer {{SECRET:K}}=").unwrap();
        let hosts: Vec<_> = route.hosts.iter().map(ToString::to_string).collect();
        assert_eq!(hosts, ["api.example.com", "*.example.org"]);
        assert_eq!(route.headers["Authorization"], "Bearer {{SECRET:K}}=");
    }

    #[test]
    fn what_is_no_route_is_refused() {
        for text in
            ["", "a.example", "a.example: X", "a.example: =x", "a.example: X=", ": X=y", "a b: X=y"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn headers_for_the_same_hosts_are_one_route() {
        let given = ["a.example: X=1", "b.example: X=1", "a.example: Y=2"];
        let routes = merged(given.iter().map(|text| parse(text).unwrap()).collect(), Vec::new());
        assert_eq!(routes.len(), 2);
        assert_eq!(routes[0].headers.len(), 2);
    }

    #[test]
    fn a_file_has_one_route_or_a_list() {
        let one = r#"{"hosts": ["a.example"], "query": {"key": "{{SECRET:K}}"}}"#;
        let file: RouteFile = one.parse().unwrap();
        assert_eq!(file.0[0].query["key"], "{{SECRET:K}}");
        let list: RouteFile = format!("[{one}, {one}]").parse().unwrap();
        assert_eq!(merged(Vec::new(), vec![file, list]).len(), 3);
        let error = r#"{"hosts": ["a.example"], "heders": {}}"#.parse::<RouteFile>().unwrap_err();
        assert!(error.contains("heders"), "{error}");
    }
}
