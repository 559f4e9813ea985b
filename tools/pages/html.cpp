#include "tools/pages/html.h"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <array>
#include <charconv>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/text.h"

namespace tessera::tools::pages {

std::string replaced(std::string_view text, char what, std::string_view by) {
  std::string result;
  for (const char c : text) result += c == what ? by : std::string_view(&c, 1);
  return result;
}

std::string escape(std::string_view text) {
  constexpr std::string_view kSpecial = "&<>\"'";
  constexpr std::array<std::string_view, 5> kEntities = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
  std::string result;
  for (const char c : base::printable(text, "\n\t")) {
    const std::size_t at = kSpecial.find(c);
    result += at == std::string_view::npos ? std::string_view(&c, 1) : kEntities[at];
  }
  return result;
}

std::string significant(double value, int digits) {
  if (!std::isfinite(value)) return std::isnan(value) ? "NaN" : (value < 0 ? "-inf" : "inf");
  return fmt::format("{:.{}g}", value, digits);
}

std::string exact(double value) {
  if (!std::isfinite(value)) return significant(value, 1);
  std::array<char, 64> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

std::string to_html(const Table& table) {
  std::string html = "<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"" + escape(table.caption) +
                     "\"><table><caption>" + escape(table.caption) + "</caption><thead><tr>";
  for (const std::string& title : table.head) html += "<th scope=\"col\">" + escape(title) + "</th>";
  html += "</tr></thead><tbody>";
  for (const auto& row : table.rows) {
    html += "<tr>";
    for (std::size_t i = 0; i < row.size(); ++i)
      html += i == 0 ? "<th scope=\"row\">" + escape(row[i]) + "</th>" : "<td>" + escape(row[i]) + "</td>";
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>\n";
}

std::string hash_source(const std::string& text) {
  std::array<unsigned char, 32> hash{};
  unsigned length = 0;
  if (EVP_Digest(text.data(), text.size(), hash.data(), &length, EVP_sha256(), nullptr) != 1)
    throw base::SystemError("report: SHA-256 failed");
  std::array<unsigned char, 4 * 11 + 1> base64{};
  EVP_EncodeBlock(base64.data(), hash.data(), static_cast<int>(length));
  return std::string("'sha256-") + reinterpret_cast<const char*>(base64.data()) + "'";
}

}  // namespace tessera::tools::pages
